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
    writes="``index`` and the views around it",
)
def index_rows_in_place(program: Program) -> Program:
    """``x[arange(rows)[:, None], columns]`` becomes ``x[:, columns]``: row b stays on its rank.

    An index that counts the rows of a batch, ``0 .. rows - 1``, selects every row once, in order; said
    with an index tensor it looks like a gather across the batch, which would be communicated.
    """
    for node in list(program.operations()):
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
