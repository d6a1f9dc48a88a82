"""Before which operation each collective completes: its first reader.

Where only one collective may be in flight, it also completes before the next one starts.
"""

from __future__ import annotations

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.planning.table import Table
from stepgraph.program.collectives import is_collective
from stepgraph.program.program import Program

aten = torch.ops.aten

# What a flat collective's result is made the members' results by.
PARTS_OF_A_RESULT = {aten.slice.Tensor, aten.reshape.default}
MOVED = {torch_internals.WAIT, *PARTS_OF_A_RESULT}


def is_moved(node: fx.Node) -> bool:
    """Whether a node is a wait, or a slice behind one."""
    return node.target is torch_internals.WAIT or (
        node.target in MOVED and node.all_input_nodes[0].target in MOVED
    )


def find_waits(program: Program, overlaps: bool) -> Table[str, str]:
    """Waits -> the operation before which each completes; in place: slices behind waits move along."""
    found: dict[str, str] = {}
    for node in reversed(list(program.operations())):
        if not is_moved(node):
            continue
        point = latest(node, overlaps)
        if node.target is torch_internals.WAIT and point.op == "call_function":
            found[node.meta["name"]] = point.meta["name"]
        move(node, point)
    return Table(found)


def latest(node: fx.Node, overlaps: bool, wanted: fx.Node | None = None) -> fx.Node:
    """The operation before which a wait, or a slice behind one, has to stand at the latest.

    Args:
        wanted: one that it is to stand before, if that comes earlier.
    """
    alone = node.target is torch_internals.WAIT and not overlaps
    behind = node.next
    while behind.op == "call_function" and behind not in node.users and behind is not wanted:
        if alone and is_collective(behind):
            break
        behind = behind.next
    return behind


def move(node: fx.Node, point: fx.Node) -> None:
    """Puts a node right before another, behind which it does not stand."""
    if point is not node.next and point.op == "call_function":
        point.prepend(node)
