"""The program of all micro-batches but the last."""

import torch

from stepgraph.capture.accumulators import accumulate, node_named, replace_boundary_by_one
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.program import Program, Value
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
    kept = [row for row in program.output_rows if not isinstance(row[0], (roles.Grad, roles.Loss))]
    grown = [(roles.NewAccumulator(name), n, Value.of(n)) for name, n in accumulated.items()]
    program.set_outputs(kept + grown)
    return program.finish()
