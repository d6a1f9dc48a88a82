"""Lets collectives overlap with what follows them: each wait goes to where it was decided.

Where only one collective may be in flight, each wait stays before the next collective whatever was decided.
"""

from __future__ import annotations

from stepgraph import torch_internals
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass
from stepgraph.schedule.waits import is_moved, latest, move


@program_pass(
    reads="before which operations waits complete; readers of the slices behind them",
    writes="their order",
)
def delay_waits(program: Program, decision: ScheduleDecision, overlaps: bool) -> Program:
    """Puts each wait where it was decided, and the slices behind it before their first reader."""
    operations = list(program.operations())
    named = {node.meta["name"]: node for node in operations}
    for node in reversed(operations):
        if not decision.waits or not is_moved(node):
            continue
        wanted = None
        if node.target is torch_internals.WAIT:
            wanted = named.get(decision.waits.get(node.meta["name"], ""), node.next)
        move(node, latest(node, overlaps, wanted))
    name_operations(program.graph)
    return program.finish()
