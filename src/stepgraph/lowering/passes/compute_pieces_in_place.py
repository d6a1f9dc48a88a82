"""Operator by operator, pieces of rows are computed in the memory of what nobody reads again."""

from typing import Any

import torch
from torch import fx

from stepgraph.operators.views import viewed
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write
from stepgraph.program.record import program_pass

aten = torch.ops.aten

_IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
}


@program_pass(
    reads="``rows_piece``: what is computed some rows at a time; who reads it",
    writes="``mul_`` and its like in place of operations on what is read by them alone",
    functional=False,
)
def compute_pieces_in_place(program: Program, fuses: bool) -> Program:
    """Writes the results of operations element by element over an operand that nothing else reads.

    Pieces of logits are large: the system clears new memory for each, which takes as long as the operation.

    Args:
        fuses: the lowering makes one kernel of several operations, which need no memory in between.
    """
    if fuses:
        return program
    for node in program.operations():
        if "rows_piece" in meta(node) and node.target in _IN_PLACE and _is_over(node):
            node.target = _IN_PLACE[node.target]
    return program.finish()


def _is_over(node: fx.Node) -> bool:
    """Whether the first operand is another piece's memory of its own, and read for the last time."""
    operand = node.args[0]
    if not isinstance(operand, fx.Node) or "rows_piece" not in meta(operand):
        return False
    here, there = meta(node)["val"], meta(operand)["val"]
    alike = (here.shape, here.stride(), here.dtype) == (there.shape, there.stride(), there.dtype)
    alone = {*operand.users} == {node} and node.args.count(operand) == 1
    return alike and alone and viewed(operand) is None and not is_write(operand)
