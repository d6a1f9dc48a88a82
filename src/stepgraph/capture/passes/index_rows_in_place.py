"""Keeps every row of a batch on its rank where an index selects them all."""

import operator

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@program_pass(
    reads="constants made of counters",
    writes="``index`` and the views around it; ``index_put``",
)
def index_rows_in_place(program: Program) -> Program:
    """``x[arange(rows)[:, None], columns]`` becomes ``x[:, columns]``: row b stays on its rank.

    An index that counts the rows of a batch, ``0 .. rows - 1``, selects every row once, in order; said
    with an index tensor it looks like a gather across the batch, which would be communicated. Nor is a
    number that is put into ``x[arange(rows)[:, None], columns]`` sent anywhere: ``scatter`` says so.
    """
    for node in list(program.operations()):
        if node.target is aten.index_put.default:
            _put_in_place(program, node)
        if node.target is not aten.index.Tensor:
            continue
        x, indices = node.args
        if (
            not isinstance(indices, (list, tuple))
            or len(indices) != 2
            or any(i is None for i in indices)
        ):
            continue
        rows, columns = indices
        shape = meta(node)["val"].shape
        size = meta(x)["val"].shape  # type: ignore[union-attr]
        if len(size) != 2 or not shape or shape[0] != size[0] or size[0] == 1:
            continue
        counter = _constant(rows)
        if counter is None or tuple(counter.shape) != (size[0],) + (1,) * (len(shape) - 1):
            continue
        column_shape = meta(columns)["val"].shape  # type: ignore[union-attr]
        leading = len(shape) - len(column_shape)
        if not torch.equal(counter.flatten(), torch.arange(size[0])) or (
            leading == 0 and column_shape[0] != 1
        ):
            continue
        emit = Builder(program, meta(node)["phase"], node)
        emit.module = meta(node)["module"]
        flat = emit(aten.view.default, columns, [column_shape.numel()])
        picked = emit(aten.index_select.default, x, 1, flat)
        result = emit(aten.view.default, picked, list(shape))
        node.replace_all_uses_with(result)
    return program.finish()


def _put_in_place(program: Program, node: fx.Node) -> None:
    """Where all indices but the last count their dimension, and what is put is one number."""
    x, indices, put, *accumulate = node.args
    assert (
        isinstance(x, fx.Node) and isinstance(put, fx.Node) and isinstance(indices, (list, tuple))
    )
    shape, number = meta(x)["val"].shape, _number(put)
    if number is None or any(accumulate) or len(indices) != len(shape) or None in indices:
        return
    *counted, last = indices
    assert isinstance(last, fx.Node)
    if meta(last)["val"].dtype == torch.bool or meta(last)["val"].shape[:-1] != shape[:-1]:
        return
    for dim, index in enumerate(counted):
        counter = _constant(index)
        wanted = torch.arange(shape[dim]).view(-1, *[1] * (len(shape) - 1 - dim))
        if counter is None or counter.dim() > len(shape):
            return
        wanted = wanted.view([1] * (counter.dim() - wanted.dim()) + [*wanted.shape])
        if not torch.equal(counter, wanted):
            return
    emit = Builder(program, meta(node)["phase"], node)
    emit.module = meta(node)["module"]
    where = emit.cast(last, torch.int64)
    node.replace_all_uses_with(emit(aten.scatter.value, x, len(shape) - 1, where, number))


def _number(node: fx.Node) -> float | None:
    """What all elements of a value are."""
    while node.target in (aten.view.default, aten.expand.default):
        node = node.args[0]  # type: ignore[assignment]
    return 1 if node.target in (aten.new_ones.default, aten.ones.default) else None


_COUNTED = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.unsqueeze.default,
    aten.view.default, aten.add.Tensor, private.TO_COPY, operator.getitem,
}  # fmt: skip


def _constant(node: object, depth: int = 12) -> torch.Tensor | None:
    """The value of a node that is made of counters only, or None."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or depth == 0:
        return None
    if node.target not in _COUNTED:
        return None
    values = {}
    for argument in node.all_input_nodes:
        values[argument] = _constant(argument, depth - 1)
        if values[argument] is None:
            return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]
