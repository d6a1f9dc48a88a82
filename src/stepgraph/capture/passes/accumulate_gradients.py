"""The program of all micro-batches but the last."""

from __future__ import annotations

import torch

from stepgraph.capture.accumulators import accumulate, describe, node_named, replace_boundary_by_one
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program
from stepgraph.program.record import SUMMATION, Results, Values, program_pass


def _expected(
    values: Values, before: Program, after: Program, normalisation: Normalisation
) -> Results:
    """Accumulators grow by the gradients per unit of the loss's normaliser, and by its parts."""
    boundary = normalisation.boundary
    results, seen = values.inside(before, {*normalisation.totals, boundary or ""})
    unit = seen[boundary] if boundary else torch.ones(())
    grown = {f"total:{name}": seen[name] for name in normalisation.totals}
    grown |= {
        f"grad:{role.name}": value / unit
        for role, value in results.items()
        if isinstance(role, roles.Grad)
    }
    given = values.given(after)
    return {
        roles.NewAccumulator(name): given[roles.Accumulator(name)] + value
        for name, value in grown.items()
    }


@program_pass(
    reads="``Grad`` and ``Loss`` outputs",
    writes="inputs ``Accumulator``, outputs ``NewAccumulator``",
    preserves=SUMMATION,
    reference=_expected,
)
def accumulate_gradients(program: Program, normalisation: Normalisation) -> Program:
    """Adds this micro-batch's gradients, sums and counts to accumulators; no update."""
    boundary = node_named(program, normalisation.boundary)
    if boundary is not None:
        replace_boundary_by_one(program, boundary, normalisation)
    accumulated = accumulate(program, normalisation)
    kept = [
        (role, node, value)
        for role, node, value in zip(
            program.outputs, program.results, program.output_values, strict=True
        )
        if not isinstance(role, (roles.Grad, roles.Loss))
    ]
    kept += [
        (roles.NewAccumulator(name), node, describe(node)) for name, node in accumulated.items()
    ]
    _set_outputs(program, kept)
    return program


def _set_outputs(program: Program, rows: list) -> None:
    program.outputs = [role for role, _, _ in rows]
    program.output_values = [value for _, _, value in rows]
    program.graph.output_node().args = (tuple(node for _, node, _ in rows),)
    name_operations(program.graph)
    program.finish()
