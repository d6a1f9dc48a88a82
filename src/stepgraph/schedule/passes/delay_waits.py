"""Lets collectives overlap with what follows them: each wait goes right before its first reader.

Where only one collective may be in flight (not ``Ranks.collectives_overlap``), each wait also stays
before the next collective.

reads: readers of waits, and of the slices behind them. writes: their order. preserves: every result,
bitwise.
"""

from __future__ import annotations

import torch

from stepgraph import torch_internals
from stepgraph.operators.views import PARTS_OF_A_RESULT
from stepgraph.program.collectives import is_collective
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program

aten = torch.ops.aten

# What a flat collective's result is cut into the members' results by.


def delay_waits(program: Program, collectives_overlap: bool) -> Program:
    """Puts each wait, and the slices behind it, as late as allowed; see the module docstring."""
    moved = {torch_internals.WAIT, *PARTS_OF_A_RESULT}
    for node in reversed(list(program.operations())):
        chain = node.target is torch_internals.WAIT or (
            node.target in moved and node.all_input_nodes[0].target in moved
        )
        if not chain:
            continue
        alone = node.target is torch_internals.WAIT and not collectives_overlap
        behind = node.next
        while behind.op == "call_function" and behind not in node.users:
            if alone and is_collective(behind):
                break
            behind = behind.next
        if behind is not node.next and behind.op == "call_function":
            behind.prepend(node)
    name_operations(program.graph)
    return program.finish()
