"""How an operation computes some rows of its result from as many rows of its arguments.

An operator without a rule here or in :mod:`stepgraph.operators.rows` has none: it may mix rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.operators.rows import (
    ONE,
    Known,
    MixesRowsError,
    Rows,
    Rule,
    Way,
    args_of,
    outside,
    require,
    shape_of,
    unchanged,
)
from stepgraph.program.collectives import ON_FIRST, SHARD_OF
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


def by_rows(node: fx.Node, known: Known, wanted: Rows | None = None) -> Way | None:
    """How an operation computes some rows; None: that is not known, or it cannot.

    Args:
        known: arguments that have rows, and where.
        wanted: where the result is to have them, if no argument says it.
    """
    rule = RULES.get(node.target) or (_elementwise if _is_elementwise(node.target) else None)
    if rule is None or not isinstance(meta(node).get("val"), torch.Tensor):
        return None
    try:
        way = rule(node, known, wanted)
    except MixesRowsError:
        return None
    agrees = all(way.arguments.get(argument) == rows for argument, rows in known.items())
    return way if agrees and wanted in (None, way.result) else None


def _is_elementwise(target: Any) -> bool:
    return operators.of(target).elementwise or target in _LIKE_ELEMENTWISE


def _aligned(shape: Sequence[int], result: Sequence[int], rows: Rows) -> Rows | None:
    """Where an argument that is broadcast to a result has its rows, or its single one; None: nowhere."""
    start, stop = (dim - len(result) + len(shape) for dim in (rows.start, rows.stop))
    if stop <= 0:
        return None
    sizes = shape[max(start, 0) : stop]
    whole = start >= 0 and tuple(sizes) == tuple(result[rows.start : rows.stop])
    require(whole or all(size == 1 for size in sizes))
    return Rows(max(start, 0), len(sizes))


_ANY_LAYOUT = (None, torch.contiguous_format, torch.preserve_format)


def _broadcast(node: fx.Node, known: Known, wanted: Rows | None) -> tuple[dict, Rows]:
    shape, result = shape_of(node), wanted
    arguments = list(dict.fromkeys(tensor_arguments(node)))
    for argument in arguments:
        if argument in known:
            there = known[argument]
            here = Rows(there.start + len(shape) - len(shape_of(argument)), there.count)
            require(result in (None, here))
            result = here
    assert result is not None
    return {a: _aligned(shape_of(a), shape, result) for a in arguments}, result


def _elementwise(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    arguments, result = _broadcast(node, known, wanted)
    # A layout that is named has as many dimensions as the whole.
    require(result.count == 1 or node.kwargs.get("memory_format") in _ANY_LAYOUT)
    return Way(arguments, result, unchanged(node))


def _expand(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    arguments, result = _broadcast(node, known, wanted)
    shape = shape_of(node)
    rest = args_of(node)[2:]
    return Way(arguments, result, lambda rows: (args_of(node)[0], result.sizes(shape, rows), *rest))


def _alike(dim_at: int) -> Rule:
    """Arguments and result have the same dimensions; one that is named is none of the rows."""

    def rule(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
        arguments = tensor_arguments(node)
        rows = next((known[a] for a in arguments if a in known), wanted)
        assert rows is not None
        many = rows.many(shape_of(node))
        for argument in arguments:
            require(
                rows.many(shape_of(argument)) == many
                and len(shape_of(argument)) == len(shape_of(node))
            )
        dim = args_of(node)[dim_at] if dim_at < len(args_of(node)) else 0
        dim = rows.dim(outside(dim, rows, len(shape_of(node))))
        args = list(args_of(node))
        args[dim_at : dim_at + 1] = [dim]
        return Way(dict.fromkeys(arguments, rows), rows, lambda _: tuple(args))

    return rule


def _embedding(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    table, indices = args_of(node)[:2]
    rows = known.get(indices, wanted)
    require(rows is not None and rows.stop <= len(shape_of(indices)))
    return Way({table: None, indices: rows}, rows, unchanged(node))


def _product(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """Rows of the first matrix, or columns of the second; where both have them, they are summed over."""
    *added, one, other = args_of(node)[:3] if node.target is aten.addmm.default else args_of(node)
    first, second = known.get(one), known.get(other)
    if first is None and second is None and wanted is not None:
        first, second = (wanted, None) if wanted.start == 0 else (None, wanted)
    arguments: dict[fx.Node, Rows | None] = {}
    if (first, second) == (Rows(1), Rows(0)):
        require(not added)
        return Way({one: first, other: second}, None, unchanged(node))
    require((first, second) in ((Rows(0), None), (None, Rows(1))))
    result = first or second
    assert result is not None
    arguments = {one: first, other: second}
    require(len(arguments) == 2)
    for bias in added:
        arguments[bias] = _aligned(shape_of(bias), shape_of(node), result)
    return Way(arguments, result, unchanged(node))


def _filled(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """What is made of its shape alone."""
    assert wanted is not None
    shape, rest = shape_of(node), args_of(node)[1:]
    return Way({}, wanted, lambda rows: (wanted.sizes(shape, rows), *rest))


def _filled_like(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """What is made of a shape, of an argument's type: of whichever part of that."""
    like = args_of(node)[0]
    assert isinstance(like, fx.Node)
    shape, rest = shape_of(node), args_of(node)[2:]
    if wanted is None:
        require(shape_of(like) == shape)
        wanted = known[like]
    made = wanted
    return Way({like: known.get(like)}, made, lambda rows: (like, made.sizes(shape, rows), *rest))


def takes_the_type(node: fx.Node) -> bool:
    """Whether an operation takes the type of its argument alone, and none of its rows."""
    return RULES.get(node.target) is _filled_like


def _slice_of(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """A rank's part; of what is the same number throughout, as much of that."""
    source, dim, ranks = args_of(node)[:3]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    fills = RULES.get(source.target) in (_filled, _filled_like)
    if source in known or not fills or wanted is None or not wanted.start <= dim < wanted.stop:
        return ONE[SHARD_OF](node, known, wanted)
    require(shape_of(source)[dim] % ranks == 0)
    way = RULES[source.target](source, {}, wanted)
    return replace(way, instead=source)


_LIKE_ELEMENTWISE = {
    torch_internals.WAIT, torch_internals.ALL_REDUCE, ON_FIRST, aten.full_like.default,
    aten.ones_like.default, aten.zeros_like.default,
}  # fmt: skip

RULES: dict[Any, Rule] = ONE | {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.expand.default: _expand,
    aten.cat.default: _alike(1),
    aten.gather.default: _alike(1),
    aten.scatter.value: _alike(1),
    aten.scatter.src: _alike(1),
    aten.scatter_add.default: _alike(1),
    aten.new_zeros.default: _filled_like,
    aten.new_full.default: _filled_like,
    aten.new_ones.default: _filled_like,
    private.SOFTMAX_BACKWARD: _alike(2),
    private.LOG_SOFTMAX_BACKWARD: _alike(2),
    aten.embedding.default: _embedding,
    SHARD_OF: _slice_of,
}
RULES |= dict.fromkeys(
    (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format), _filled
)
