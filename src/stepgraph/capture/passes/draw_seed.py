"""Draws the seed of a graph."""

from __future__ import annotations

import torch

from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.names import name_operations
from stepgraph.program.program import FORWARD, Program
from stepgraph.program.record import DISTRIBUTION, program_pass

aten = torch.ops.aten


_APART = 0x9E3779B97F4A7  # ranks whose generators are alike draw words that differ


@program_pass(
    reads="the input ``Seed``",
    writes="the operation that draws it, other words on every rank",
    preserves=DISTRIBUTION,
)
def draw_seed(program: Program, rank: int) -> Program:
    """The seed of a graph's random operations comes out of torch's generator, once a forward."""
    if roles.Seed() not in program.inputs:
        return program
    index = program.inputs.index(roles.Seed())
    given = program.placeholders[index]
    first = next(program.operations())
    emit = Builder(program, FORWARD, first)
    device = given.meta["val"].device
    words = emit(aten.randint.low, 0, 2**62, [3], dtype=torch.int64, device=device)
    given.replace_all_uses_with(emit(aten.add.Scalar, words, rank * _APART))
    program.graph.erase_node(given)
    del program.inputs[index], program.input_values[index]
    name_operations(program.graph)
    return program.finish()
