"""The type that gradients travel in."""

from collections.abc import Mapping

import torch
from torch import fx

from stepgraph.capture.precision import cast, replace_gradients
from stepgraph.planning.request import AS_IT_IS, Precision
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.program import BACKWARD, Program
from stepgraph.program.record import SUMMATION, program_pass

aten = torch.ops.aten


@program_pass(
    reads="``Grad`` outputs, and sums over micro-batches",
    writes="casts around the place where gradients are reduced",
    preserves=SUMMATION,
)
def reduce_gradients_in(
    program: Program, masters: Mapping[str, torch.dtype], precision: Precision | None
) -> Program:
    """Gradients travel in the type that they are to be reduced in, and arrive as stored parameters.

    Args:
        program: its gradients complete.
        masters: the types that parameters are stored in, by name.
        precision: of the step; None: gradients have been reduced for every micro-batch.
    """
    if precision is None or precision == AS_IT_IS:
        return program

    def reduced(emit: Builder, name: str, node: fx.Node) -> fx.Node:
        return _reduced(emit, node, masters[name], precision)

    totals = {
        role.name.removeprefix("grad:"): node
        for role, node, _ in program.input_rows
        if isinstance(role, roles.Accumulator) and role.name.startswith("grad:")
    }
    for name, accumulator in totals.items():
        (total,) = accumulator.users
        readers = list(total.users)
        new = reduced(Builder(program, BACKWARD, total.next), name, total)
        for reader in readers:
            reader.replace_input_with(total, new)
    if not totals:
        replace_gradients(program, reduced)
    return program.finish()


def _reduced(emit: Builder, node: fx.Node, master: torch.dtype, precision: Precision) -> fx.Node:
    """Cast for the reduction, and back behind it."""
    node = cast(emit, node, precision.reduce or precision.compute)
    return cast(emit, node, master, "reduced_before")
