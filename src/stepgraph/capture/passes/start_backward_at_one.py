"""Starts the backward of a loss."""

import torch

from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, Program
from stepgraph.program.record import program_pass

aten = torch.ops.aten


@program_pass(
    reads="the ``Tangent`` input",
    writes="a constant in its place",
)
def start_backward_at_one(program: Program) -> Program:
    """The gradient of the loss with respect to itself is one."""
    if roles.Tangent() not in program.inputs:
        return program
    tangent = program.input_node(roles.Tangent())
    first = next((n for n in program.graph.nodes if n in tangent.users), None)
    emit = Builder(program, BACKWARD, first)
    value = meta(tangent)["val"]
    one = emit(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    tangent.replace_all_uses_with(one)
    program.keep_inputs(lambda role, _: role != roles.Tangent())
    return program.finish()
