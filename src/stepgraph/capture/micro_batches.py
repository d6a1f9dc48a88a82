"""Micro-batches: one program that accumulates, run k - 1 times, and a last one that also updates.

What is compiled does not grow with k. Gradients and the loss's sums and counts are added up in
accumulators; whatever normalises the loss (its tail, :class:`Normalisation`) is evaluated once, on
the totals, and the gradients are scaled by it at the end.
"""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.names import name_operations
from stepgraph.program.program import BACKWARD, OPTIMIZER, Program, Value

aten = torch.ops.aten


def start_backward_at_one(program: Program) -> Program:
    """The gradient of the loss with respect to itself is one.

    reads: the ``Tangent`` input. writes: a constant in its place. preserves: every gradient, bitwise.
    """
    if roles.Tangent() not in program.inputs:
        return program
    tangent = program.input_node(roles.Tangent())
    first = next((n for n in program.graph.nodes if n in tangent.users), None)
    emit = Builder(program, BACKWARD, first)
    value = tangent.meta["val"]
    one = emit(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    tangent.replace_all_uses_with(one)
    _drop_input(program, tangent)
    name_operations(program.graph)
    return program.finish()


def accumulate_gradients(program: Program, normalisation: Normalisation) -> Program:
    """Adds this micro-batch's gradients, sums and counts to accumulators; no update.

    reads: ``Grad`` and ``Loss`` outputs. writes: inputs ``Accumulator``, outputs ``NewAccumulator``.
    preserves: the sum over micro-batches.
    """
    boundary = _node(program, normalisation.boundary)
    if boundary is not None:
        _replace_boundary_by_one(program, boundary, normalisation)
    accumulated = _accumulate(program, normalisation)
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


def finish_accumulation(program: Program, normalisation: Normalisation, count: int) -> Program:
    """Adds the last micro-batch and turns totals into the loss and gradients of the whole batch.

    Args:
        count: number of micro-batches; a mean over each becomes the mean over all.

    reads: ``Grad`` and ``Loss`` outputs. writes: inputs ``Accumulator``; the loss's tail, moved behind
    the last sum. preserves: the result of the whole batch where ``normalisation.exact``.
    """
    boundary = _node(program, normalisation.boundary)
    if boundary is not None:
        _replace_boundary_by_one(program, boundary, normalisation)
    sums = _accumulate(program, normalisation)
    emit = Builder(program, BACKWARD)
    by_name = {node.meta.get("name"): node for node in program.operations()}
    totals: dict[fx.Node, fx.Node] = {}
    for name, kind in normalisation.totals.items():
        total = sums[f"total:{name}"]
        if kind == "avg":
            total = emit(aten.div.Scalar, total, count)
        totals[by_name[name]] = total
    tail = _move_tail(program, normalisation, totals)
    loss = program.result(roles.Loss())
    loss = totals.get(loss, tail.get(loss, loss))
    factor = tail.get(boundary) if boundary is not None else None
    averaged = normalisation.gradient_kind == "avg"
    emit = Builder(program, OPTIMIZER)
    results = []
    for role, node in zip(program.outputs, program.results, strict=True):
        if isinstance(role, roles.Grad):
            total = sums[f"grad:{role.name}"]
            if factor is not None:
                dtype = total.meta["val"].dtype
                same = factor.meta["val"].dtype == dtype
                scale = factor if same else emit(aten._to_copy.default, factor, dtype=dtype)
                total = emit(aten.mul.Tensor, total, scale)
            node = emit(aten.div.Scalar, total, count) if averaged else total
        results.append(loss if isinstance(role, roles.Loss) else node)
    program.graph.output_node().args = (tuple(results),)
    name_operations(program.graph)
    return start_backward_at_one(program.finish())


def _node(program: Program, name: str | None) -> fx.Node | None:
    if name is None:
        return None
    return next(node for node in program.operations() if node.meta["name"] == name)


def _replace_boundary_by_one(
    program: Program, boundary: fx.Node, normalisation: Normalisation
) -> None:
    """The rest of the backward is proportional to the boundary: run it at one, scale at the end."""
    emit = Builder(program, BACKWARD, boundary)
    value = boundary.meta["val"]
    one = emit(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    for user in list(boundary.users):
        if user.meta.get("name") not in normalisation.tail:
            user.replace_input_with(boundary, one)


def _accumulate(program: Program, normalisation: Normalisation) -> dict[str, fx.Node]:
    """Adds gradients and the loss's partial results to accumulators; returns the new sums."""
    emit = Builder(program, BACKWARD)
    by_name = {node.meta.get("name"): node for node in program.operations()}
    parts = {
        f"grad:{role.name}": node
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.Grad)
    }
    parts |= {f"total:{name}": by_name[name] for name in normalisation.totals}
    sums = {}
    for name, node in parts.items():
        value = node.meta["val"]
        accumulator = emit.input(
            roles.label(roles.Accumulator(name)),
            lambda value=value: torch.empty(value.shape, dtype=value.dtype, device=value.device),
        )
        index = program.placeholders.index(accumulator)
        program.inputs.insert(index, roles.Accumulator(name))
        program.input_values.insert(index, _value(node))
        sums[name] = emit(aten.add.Tensor, accumulator, node)
        sums[name].meta["accumulates"] = True
    return sums


def _move_tail(
    program: Program, normalisation: Normalisation, totals: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copies the tail behind the totals, in order, reading them; returns old -> new."""
    emit = Builder(program, BACKWARD)
    moved: dict[fx.Node, fx.Node] = dict(totals)
    tail = [node for node in program.operations() if node.meta.get("name") in normalisation.tail]
    for node in tail:
        emit.module = node.meta["module"]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: moved.get(a, a))
        moved[node] = emit(node.target, *args, **kwargs)
    return moved


def _drop_input(program: Program, node: fx.Node) -> None:
    index = program.placeholders.index(node)
    program.graph.erase_node(node)
    del program.inputs[index], program.input_values[index]


def _set_outputs(program: Program, rows: list) -> None:
    program.outputs = [role for role, _, _ in rows]
    program.output_values = [value for _, _, value in rows]
    program.graph.output_node().args = (tuple(node for _, node, _ in rows),)
    name_operations(program.graph)
    program.finish()


def _value(node: fx.Node) -> Value:
    value = node.meta["val"]
    return Value(tuple(value.shape), value.dtype)
