"""Lets collectives overlap with what follows them: each wait goes to where it was decided.

Where only one collective may be in flight, each wait stays before the next collective whatever was decided.
"""

from stepgraph import torch_internals
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass
from stepgraph.schedule.waits import moved_last_first


@program_pass(
    reads="before which operations waits complete; readers of the slices behind them",
    writes="their order",
)
def delay_waits(program: Program, decision: ScheduleDecision, overlaps: bool) -> Program:
    """Puts each wait where it was decided, and the slices behind it before their first reader."""
    named = {meta(node)["name"]: node for node in program.operations()}
    for node, following in moved_last_first(program) if decision.waits else ():
        points = set(node.users)
        if node.target is torch_internals.WAIT:
            points.add(named.get(decision.waits.get(meta(node)["name"], ""), node.next))
            if following is not None and not overlaps:
                points.add(following)
        first = min(points, default=node.next)
        if first is not node.next and first.op == "call_function":
            first.prepend(node)
    return program.finish()
