"""Micro-batches: one program that accumulates, run k - 1 times, and a last one that also updates.

What is compiled does not grow with k. Gradients and the loss's sums and counts are added up in
accumulators; whatever normalises the loss (its tail, :class:`Normalisation`) is evaluated once, on
the totals, and the gradients are scaled by it at the end.
"""

import torch
from torch import fx

from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, Program

aten = torch.ops.aten


def node_named(program: Program, name: str | None) -> fx.Node | None:
    """The operation of a stable name, or None for None."""
    if name is None:
        return None
    return next(node for node in program.operations() if meta(node)["name"] == name)


def replace_boundary_by_one(
    program: Program, boundary: fx.Node, normalisation: Normalisation
) -> None:
    """The rest of the backward is proportional to the boundary: run it at one, scale at the end."""
    emit = Builder(program, BACKWARD, boundary)
    value = meta(boundary)["val"]
    one = emit(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    for user in list(boundary.users):
        if meta(user).get("name") not in normalisation.tail:
            user.replace_input_with(boundary, one)


def accumulate(program: Program, normalisation: Normalisation) -> dict[str, fx.Node]:
    """Adds gradients and the loss's partial results to accumulators; returns the new sums."""
    emit = Builder(program, BACKWARD)
    by_name = {meta(node).get("name"): node for node in program.operations()}
    parts = {f"grad:{name}": node for name, node in program.gradients.items()}
    parts |= {f"total:{name}": by_name[name] for name in normalisation.totals}
    sums = {}
    for name, node in parts.items():
        value = meta(node)["val"]
        accumulator = emit.input(roles.Accumulator(name), value.shape, value.dtype, value.device)
        sums[name] = emit(aten.add.Tensor, accumulator, node)
        meta(sums[name])["accumulates"] = True
    return sums
