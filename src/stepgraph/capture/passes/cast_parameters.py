"""Parameters are stored in one type, and read in the one that the model computes in."""

from collections.abc import Mapping

import torch
from torch import fx

from stepgraph.capture.precision import cast, replace_gradients
from stepgraph.planning.request import AS_IT_IS, Precision
from stepgraph.program import roles
from stepgraph.program.build import Builder, ShapeRunner
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program, Value
from stepgraph.program.record import program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@program_pass(
    reads="``Param`` inputs, ``Grad`` outputs",
    writes=(
        "a cast of each parameter of another type, where it is first read (so it belongs to "
        "what a memory policy recomputes) and in front of any gather, so that the smaller "
        "type travels"
    ),
)
def cast_parameters(
    program: Program, masters: Mapping[str, torch.dtype], precision: Precision, accumulate: bool
) -> Program:
    """Stored parameters are read through a cast; gradients that will be accumulated are cast back.

    Args:
        program: captured with parameters of the type that the model computes in.
        masters: the types that parameters are stored in, by name.
        precision: of the step.
        accumulate: over micro-batches, in the type of the stored parameter.
    """
    if precision == AS_IT_IS:
        return program
    runner = ShapeRunner(program.graph)
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    emit = Builder(program, FORWARD)
    for index, (role, node, _) in enumerate(program.input_rows):
        if not isinstance(role, roles.Param):
            continue
        value, master = meta(node)["val"], masters[role.name]
        if value.dtype == master:
            continue
        with runner.mode:
            meta(node)["val"] = torch.empty_like(value, dtype=master)
        program.input_values[index] = Value(tuple(value.shape), master)
        emit.module = role.name.rpartition(".")[0]
        readers = sorted(node.users, key=position.__getitem__)
        emit.point = readers[0] if readers else program.graph.output_node()
        emit.phase = meta(emit.point).get("phase", FORWARD)
        cast = emit(private.TO_COPY, node, dtype=value.dtype)
        meta(cast)["casts_parameter"] = True
        for reader in readers:
            reader.replace_input_with(node, cast)
    if accumulate:
        replace_gradients(
            program, lambda emit, name, node: _into(emit, node, masters[name], precision)
        )
    return program.finish()


def _into(emit: Builder, node: fx.Node, master: torch.dtype, precision: Precision) -> fx.Node:
    """Cast for an accumulator; one that is sharded gets it reduced."""
    node = cast(emit, node, precision.reduce)
    return cast(emit, node, master, "accumulated_next")
