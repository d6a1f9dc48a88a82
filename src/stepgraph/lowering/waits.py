"""Lets collectives overlap with what follows them: each wait goes right before its first reader.

Only where several collectives may be in flight at once (``Ranks.collectives_overlap``); elsewhere every
wait stays right behind its collective.

reads: readers of waits, and of the slices behind them. writes: their order. preserves: every result,
bitwise.
"""

from __future__ import annotations

import torch

from stepgraph import torch_internals
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program

aten = torch.ops.aten


def delay_waits(program: Program) -> Program:
    """Puts each wait, and the slices behind it, right before their first reader."""
    moved = {torch_internals.WAIT, aten.slice.Tensor, aten.reshape.default}
    for node in reversed(list(program.operations())):
        chain = node.target is torch_internals.WAIT or (
            node.target in moved and node.all_input_nodes[0].target in moved
        )
        if not chain:
            continue
        readers = set(node.users)
        behind = node.next
        while behind.op == "call_function" and behind not in readers:
            behind = behind.next
        if behind is not node.next and behind.op == "call_function":
            behind.prepend(node)
    name_operations(program.graph)
    return program.finish()
