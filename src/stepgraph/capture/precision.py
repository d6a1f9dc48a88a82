"""Mixed precision: the model computes in one type, parameters are stored and updated in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.program import roles
from stepgraph.program.build import Builder, ShapeRunner
from stepgraph.program.names import name_operations
from stepgraph.program.program import BACKWARD, FORWARD, Program, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Precision:
    """The types of a step.

    ``compute``: what parameters and floating-point inputs are cast to; None: as they are. ``reduce``:
    what gradients are reduced in; None: what they are computed in.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


AS_IT_IS = Precision()


def cast_parameters(
    program: Program, masters: Mapping[str, torch.dtype], precision: Precision, accumulate: bool
) -> Program:
    """Stored parameters are read through a cast; gradients that will be accumulated are cast back.

    Args:
        program: captured with parameters of the type that the model computes in.
        masters: the types that parameters are stored in, by name.
        precision: of the step.
        accumulate: over micro-batches, in the type of the stored parameter.

    reads: ``Param`` inputs, ``Grad`` outputs. writes: a cast of each parameter of another type, where it is
    first read (so it belongs to what a memory policy recomputes) and in front of any gather, so that the
    smaller type travels. preserves: every result, bitwise.
    """
    runner = ShapeRunner(program.graph)
    rows = list(zip(program.placeholders, program.inputs, strict=True))
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    emit = Builder(program, FORWARD)
    for index, (node, role) in enumerate(rows):
        if not isinstance(role, roles.Param):
            continue
        value, master = node.meta["val"], masters[role.name]
        if value.dtype == master:
            continue
        with runner.mode:
            node.meta["val"] = torch.empty_like(value, dtype=master)
        program.input_values[index] = Value(tuple(value.shape), master)
        emit.module = role.name.rpartition(".")[0]
        readers = sorted(node.users, key=position.__getitem__)
        emit.point = readers[0] if readers else program.graph.output_node()
        emit.phase = emit.point.meta.get("phase", FORWARD)
        cast = emit(aten._to_copy.default, node, dtype=value.dtype)
        cast.meta["casts_parameter"] = True
        for reader in readers:
            reader.replace_input_with(node, cast)
    if accumulate:
        _replace_gradients(
            program, lambda emit, name, node: _into(emit, node, masters[name], precision)
        )
    name_operations(program.graph)
    return program.finish()


def reduce_gradients_in(
    program: Program, masters: Mapping[str, torch.dtype], precision: Precision
) -> Program:
    """Gradients travel in the type that they are to be reduced in, and arrive as stored parameters.

    Args:
        program: its gradients complete.

    reads: ``Grad`` outputs, and sums over micro-batches. writes: casts around the place where gradients
    are reduced. preserves: every result, up to the rounding that ``precision`` asks for.
    """

    def cast(emit: Builder, name: str, node: fx.Node) -> fx.Node:
        return _reduced(emit, node, masters[name], precision)

    totals = {
        role.name.removeprefix("grad:"): node
        for node, role in zip(program.placeholders, program.inputs, strict=True)
        if isinstance(role, roles.Accumulator) and role.name.startswith("grad:")
    }
    for name, accumulator in totals.items():
        (total,) = accumulator.users
        readers = list(total.users)
        new = cast(Builder(program, BACKWARD, total.next), name, total)
        for reader in readers:
            reader.replace_input_with(total, new)
    if not totals:
        _replace_gradients(program, cast)
    name_operations(program.graph)
    return program.finish()


def _cast(emit: Builder, node: fx.Node, dtype: torch.dtype | None, tag: str = "") -> fx.Node:
    new = node if dtype is None else emit.cast(node, dtype)
    if tag and new is not node:
        new.meta[tag] = True
    return new


def _reduced(emit: Builder, node: fx.Node, master: torch.dtype, precision: Precision) -> fx.Node:
    """Cast for the reduction, and back behind it."""
    node = _cast(emit, node, precision.reduce or precision.compute)
    return _cast(emit, node, master, "reduced_before")


def _into(emit: Builder, node: fx.Node, master: torch.dtype, precision: Precision) -> fx.Node:
    """Cast for an accumulator; one that is sharded gets it reduced."""
    node = _cast(emit, node, precision.reduce)
    return _cast(emit, node, master, "accumulated_next")


def _replace_gradients(program: Program, cast) -> None:
    results = []
    rows = zip(program.outputs, program.results, program.output_values, strict=True)
    for index, (role, node, value) in enumerate(list(rows)):
        if isinstance(role, roles.Grad):
            emit = Builder(program, BACKWARD)
            emit.module = role.name.rpartition(".")[0]
            node = cast(emit, role.name, node)
            program.output_values[index] = Value(value.shape, node.meta["val"].dtype)
        results.append(node)
    program.graph.output_node().args = (tuple(results),)
