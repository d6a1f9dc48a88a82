"""Drops operands of no elements."""

import torch
from torch import fx

from stepgraph.capture.passes.drop_identities import lie_alike
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass

aten = torch.ops.aten


@program_pass(
    reads="shapes",
    writes="arguments of ``cat``",
)
def drop_empty_cat_operands(program: Program) -> Program:
    """Concatenations forget operands of no elements (an empty key-value cache).

    One operand is left where it does not lie in memory as the result does: views of that follow.
    """
    for node in list(program.operations()):
        if node.target is not aten.cat.default:
            continue
        operands: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        kept = [operand for operand in operands if meta(operand)["val"].numel()]
        same_type = all(meta(o)["val"].dtype == meta(node)["val"].dtype for o in kept)
        if len(kept) == len(operands) or not kept or not same_type:
            continue
        if len(kept) == 1 and lie_alike(meta(kept[0])["val"], meta(node)["val"]):
            node.replace_all_uses_with(kept[0])
        else:
            node.args = (kept, *node.args[1:])
    return program.finish()
