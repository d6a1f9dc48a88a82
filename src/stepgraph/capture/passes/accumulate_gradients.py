"""The program of all micro-batches but the last."""

from __future__ import annotations

import torch

from stepgraph.capture.accumulation import _value, accumulate, node_named, replace_boundary_by_one
from stepgraph.capture.passes.start_backward_at_one import start_backward_at_one
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program

aten = torch.ops.aten


def accumulate_gradients(program: Program, normalisation: Normalisation) -> Program:
    """Adds this micro-batch's gradients, sums and counts to accumulators; no update.

    reads: ``Grad`` and ``Loss`` outputs. writes: inputs ``Accumulator``, outputs ``NewAccumulator``.
    preserves: the sum over micro-batches.
    """
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
    kept += [(roles.NewAccumulator(name), node, _value(node)) for name, node in accumulated.items()]
    _set_outputs(program, kept)
    return start_backward_at_one(program)


def _set_outputs(program: Program, rows: list) -> None:
    program.outputs = [role for role, _, _ in rows]
    program.output_values = [value for _, _, value in rows]
    program.graph.output_node().args = (tuple(node for _, node, _ in rows),)
    name_operations(program.graph)
    program.finish()
