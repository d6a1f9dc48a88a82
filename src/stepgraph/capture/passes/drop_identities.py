"""Drops what only renames a value."""

import torch
from torch import fx

from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass

aten = torch.ops.aten


# In a functional program an alias is its source.
IDENTITIES = (aten.detach.default, aten.alias.default)


def copies_alike(node: fx.Node) -> bool:
    """Whether a functional ``copy`` puts a value over one of the same kind: it is that value.

    Of the same strides as well: a view of the result may not be one of a value that lies otherwise.
    """
    if node.target is not aten.copy.default:
        return False
    old, new = (meta(argument)["val"] for argument in node.args)  # type: ignore[union-attr]
    return lie_alike(old, new) and old.dtype == new.dtype


def lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values have one shape and lie alike in memory."""
    return one.shape == other.shape and one.stride() == other.stride()


@program_pass(
    reads="the operator",
    writes="arguments",
)
def drop_identities(program: Program) -> Program:
    """Readers of ``detach``, ``alias`` and functional copies read what those were taken of."""
    for node in list(program.operations()):
        if node.target in IDENTITIES:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif copies_alike(node):
            node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
    return program.finish()
