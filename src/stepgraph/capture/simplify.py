"""Passes over the captured Program that make later decisions see what is there.

Each is a verb phrase of its own; none changes a result by a bit.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from stepgraph.program.build import Builder
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program

aten = torch.ops.aten

# In a functional program an alias is its source.
IDENTITIES = (aten.detach.default, aten.alias.default)


def copies_alike(node: fx.Node) -> bool:
    """Whether a functional ``copy`` puts a value over one of the same kind: it is that value.

    Of the same strides as well: a view of the result may not be one of a value that lies otherwise.
    """
    if node.target is not aten.copy.default:
        return False
    old, new = (argument.meta["val"] for argument in node.args)  # type: ignore[union-attr]
    return _lie_alike(old, new) and old.dtype == new.dtype


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride()


def drop_identities(program: Program) -> Program:
    """Readers of ``detach``, ``alias`` and functional copies read what those were taken of.

    reads: the operator. writes: arguments. preserves: every result, bitwise (the Program is
    functional, so an alias is its source).
    """
    for node in list(program.operations()):
        if node.target in IDENTITIES:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif copies_alike(node):
            node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
    return program.finish()


def drop_empty_cat_operands(program: Program) -> Program:
    """Concatenations forget operands of no elements (an empty key-value cache).

    One operand is left where it does not lie in memory as the result does: views of that follow.

    reads: shapes. writes: arguments of ``cat``. preserves: every result, bitwise.
    """
    for node in list(program.operations()):
        if node.target is not aten.cat.default:
            continue
        operands: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        kept = [operand for operand in operands if operand.meta["val"].numel()]
        same_type = all(o.meta["val"].dtype == node.meta["val"].dtype for o in kept)
        if len(kept) == len(operands) or not kept or not same_type:
            continue
        if len(kept) == 1 and _lie_alike(kept[0].meta["val"], node.meta["val"]):
            node.replace_all_uses_with(kept[0])
        else:
            node.args = (kept, *node.args[1:])
    return program.finish()


def index_rows_in_place(program: Program) -> Program:
    """``x[arange(rows)[:, None], columns]`` becomes ``x[:, columns]``: row b stays on its rank.

    An index that counts the rows of a batch, ``0 .. rows - 1``, selects every row once, in order; said
    with an index tensor it looks like a gather across the batch, which would be communicated.

    reads: constants made of counters. writes: ``index`` and the views around it. preserves: every
    result, bitwise.
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
        shape = node.meta["val"].shape
        size = x.meta["val"].shape  # type: ignore[union-attr]
        if len(size) != 2 or not shape or shape[0] != size[0] or size[0] == 1:
            continue
        counter = _constant(rows)
        if counter is None or tuple(counter.shape) != (size[0],) + (1,) * (len(shape) - 1):
            continue
        column_shape = columns.meta["val"].shape
        leading = len(shape) - len(column_shape)
        if not torch.equal(counter.flatten(), torch.arange(size[0])) or (
            leading == 0 and column_shape[0] != 1
        ):
            continue
        emit = Builder(program, node.meta["phase"], node)
        emit.module = node.meta["module"]
        flat = emit(aten.view.default, columns, [column_shape.numel()])
        picked = emit(aten.index_select.default, x, 1, flat)
        result = emit(aten.view.default, picked, list(shape))
        node.replace_all_uses_with(result)
    name_operations(program.graph)
    return program.finish()


_COUNTED = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.unsqueeze.default,
    aten.view.default, aten.add.Tensor, aten._to_copy.default, operator.getitem,
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
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]
