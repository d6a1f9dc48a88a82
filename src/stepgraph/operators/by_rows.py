"""How an operation computes some rows of its result from as many rows of its arguments.

Rows are tokens, most often. They are one dimension of a value or several neighbours (batch and sequence,
which are flattened on the way to a head), told by where they stand; in a piece of the rows they are one.
An operator without a rule here has none: it may mix rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.program.collectives import ON_FIRST, SHARD_OF
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


@dataclass(frozen=True)
class Rows:
    """Dimensions ``start`` to ``start + count`` (exclusive) of a value are its rows."""

    start: int
    count: int = 1

    @property
    def stop(self) -> int:
        """The dimension behind them."""
        return self.start + self.count

    def dim(self, dim: int) -> int:
        """Where a dimension stands in a piece, in which rows are one dimension."""
        return dim if dim <= self.start else max(dim - self.count + 1, self.start)

    def sizes(self, shape: Sequence[int], rows: int) -> list[int]:
        """The shape of a piece of so many rows."""
        return [*shape[: self.start], rows, *shape[self.stop :]]

    def many(self, shape: Sequence[int]) -> int:
        """How many there are in a shape."""
        return math.prod(shape[self.start : self.stop])


@dataclass(frozen=True)
class Way:
    """How an operation computes a piece.

    Attributes:
        arguments: where tensor arguments have their rows; None: the piece takes the whole argument. An
            argument with a single row in that place is repeated for all.
        result: where the result has its rows; None: it has none, and results of pieces add up.
        args: the operation's arguments for so many rows, of the same nodes.
        instead: the operation that computes it, where that is another one.
    """

    arguments: Mapping[fx.Node, Rows | None]
    result: Rows | None
    args: Callable[[int], tuple[Any, ...]]
    instead: fx.Node | None = None


Known = Mapping[fx.Node, Rows]
_Rule = Callable[[fx.Node, Known, Rows | None], Way]


class _MixesRowsError(Exception):
    """An operation does not compute its rows one by one, as far as is known here."""


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
    except _MixesRowsError:
        return None
    agrees = all(way.arguments.get(argument) == rows for argument, rows in known.items())
    return way if agrees and wanted in (None, way.result) else None


def _is_elementwise(target: Any) -> bool:
    return operators.of(target).elementwise or target in _LIKE_ELEMENTWISE


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(meta(node)["val"].shape)


def _check(holds: bool) -> None:
    if not holds:
        raise _MixesRowsError


def _same(node: fx.Node) -> Callable[[int], tuple[Any, ...]]:
    return lambda rows: node.args


def _with(node: fx.Node, **changed: Any) -> Callable[[int], tuple[Any, ...]]:
    """The arguments of an operation, but for some: ``_1=...`` is that in position 1."""
    places = {int(name[1:]): value for name, value in changed.items()}
    args = tuple(places.get(i, argument) for i, argument in enumerate(node.args))
    return lambda rows: args


def _outside(dim: Any, rows: Rows, rank: int) -> int:
    """A dimension that is none of the rows, counted from the front."""
    dim %= rank
    _check(not rows.start <= dim < rows.stop)
    return dim


# ------------------------------------------------------------------------------ several arguments


def _aligned(shape: Sequence[int], result: Sequence[int], rows: Rows) -> Rows | None:
    """Where an argument that is broadcast to a result has its rows, or its single one; None: nowhere."""
    start, stop = (dim - len(result) + len(shape) for dim in (rows.start, rows.stop))
    if stop <= 0:
        return None
    sizes = shape[max(start, 0) : stop]
    whole = start >= 0 and tuple(sizes) == tuple(result[rows.start : rows.stop])
    _check(whole or all(size == 1 for size in sizes))
    return Rows(max(start, 0), len(sizes))


def _broadcast(node: fx.Node, known: Known, wanted: Rows | None) -> tuple[dict, Rows]:
    shape, result = _shape(node), wanted
    arguments = list(dict.fromkeys(tensor_arguments(node)))
    for argument in arguments:
        if argument in known:
            there = known[argument]
            here = Rows(there.start + len(shape) - len(_shape(argument)), there.count)
            _check(result in (None, here))
            result = here
    assert result is not None
    return {a: _aligned(_shape(a), shape, result) for a in arguments}, result


def _elementwise(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    arguments, result = _broadcast(node, known, wanted)
    return Way(arguments, result, _same(node))


def _expand(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    arguments, result = _broadcast(node, known, wanted)
    shape = _shape(node)
    rest = node.args[2:]
    return Way(
        arguments, result, lambda rows: (node.args[0], result.sizes(shape, rows), *rest)
    )


def _alike(dim_at: int) -> _Rule:
    """Arguments and result have the same dimensions; one that is named is none of the rows."""

    def rule(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
        arguments = tensor_arguments(node)
        rows = next((known[a] for a in arguments if a in known), wanted)
        assert rows is not None
        many = rows.many(_shape(node))
        for argument in arguments:
            _check(rows.many(_shape(argument)) == many and len(_shape(argument)) == len(_shape(node)))
        dim = node.args[dim_at] if dim_at < len(node.args) else 0
        dim = rows.dim(_outside(dim, rows, len(_shape(node))))
        args = list(node.args)
        args[dim_at:dim_at + 1] = [dim]
        return Way(dict.fromkeys(arguments, rows), rows, lambda _: tuple(args))

    return rule


def _embedding(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    table, indices = node.args[:2]
    rows = known.get(indices, wanted)  # type: ignore[arg-type]
    _check(rows is not None and rows.stop <= len(_shape(indices)))  # type: ignore[arg-type]
    return Way({table: None, indices: rows}, rows, _same(node))  # type: ignore[dict-item]


def _product(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """Rows of the first matrix, or columns of the second; where both have them, they are summed over."""
    *added, one, other = node.args[:3] if node.target is aten.addmm.default else node.args
    first, second = known.get(one), known.get(other)  # type: ignore[arg-type]
    if first is None and second is None and wanted is not None:
        first, second = (wanted, None) if wanted.start == 0 else (None, wanted)
    arguments: dict[fx.Node, Rows | None] = {}
    if (first, second) == (Rows(1), Rows(0)):
        _check(not added)
        return Way({one: first, other: second}, None, _same(node))  # type: ignore[dict-item]
    _check((first, second) in ((Rows(0), None), (None, Rows(1))))
    result = first or second
    assert result is not None
    arguments = {one: first, other: second}  # type: ignore[dict-item]
    _check(len(arguments) == 2)
    for bias in added:
        arguments[bias] = _aligned(_shape(bias), _shape(node), result)  # type: ignore[index,arg-type]
    return Way(arguments, result, _same(node))


def _filled(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """What is made of its shape alone."""
    assert wanted is not None
    shape, rest = _shape(node), node.args[1:]
    return Way({}, wanted, lambda rows: (wanted.sizes(shape, rows), *rest))


def _filled_like(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """What is made of a shape, of an argument's type: of whichever part of that."""
    like = node.args[0]
    assert isinstance(like, fx.Node)
    _check(wanted is not None)
    shape, rest = _shape(node), node.args[2:]
    return Way(
        {like: known.get(like)}, wanted, lambda rows: (like, wanted.sizes(shape, rows), *rest)  # type: ignore[union-attr]
    )


# ------------------------------------------------------------------------------------ one argument

def _slice_of(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    """A rank's part; of what is the same number throughout, as much of that."""
    source, dim, ranks = node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    fills = RULES.get(source.target) in (_filled, _filled_like)
    if source in known or not fills or wanted is None or not wanted.start <= dim < wanted.stop:
        return _of_one(_along(1))(node, known, wanted)
    _check(_shape(source)[dim] % ranks == 0)  # type: ignore[operator]
    way = RULES[source.target](source, {}, wanted)
    return replace(way, instead=source)


# Of where its argument has rows: where the result has them, and the operation's arguments.
_Moved = tuple[Rows | None, Callable[[int], tuple[Any, ...]]]


def _of_one(moved: Callable[[fx.Node, Rows], _Moved]) -> _Rule:
    """The rule of an operator with one tensor argument; backwards by trying where its rows may be."""

    def rule(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
        (argument,) = tensor_arguments(node)
        if argument in known:
            result, args = moved(node, known[argument])
            return Way({argument: known[argument]}, result, args)
        assert wanted is not None
        for start in range(len(_shape(argument)) - wanted.count + 1):
            rows = Rows(start, wanted.count)
            try:
                result, args = moved(node, rows)
            except _MixesRowsError:
                continue
            if result == wanted and rows.many(_shape(argument)) == wanted.many(_shape(node)):
                return Way({argument: rows}, result, args)
        raise _MixesRowsError

    return rule


def _view(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    old, new = _shape(argument), _shape(node)
    if argument in known:
        before = known[argument]
        after = _reshaped(old, before, new)
    else:
        assert wanted is not None
        before, after = _reshaped(new, wanted, old), wanted
    return Way({argument: before}, after, lambda rows: (argument, after.sizes(new, rows)))


def _reshaped(old: Sequence[int], rows: Rows, new: Sequence[int]) -> Rows:
    """Where rows are in another shape of the same elements: behind as many, and as many."""
    before, many = math.prod(old[: rows.start]), rows.many(old)
    for start in reversed(range(len(new))):
        if math.prod(new[:start]) != before:
            continue
        for count in range(1, len(new) - start + 1):
            if math.prod(new[start : start + count]) == many:
                return Rows(start, count)
    raise _MixesRowsError


def _permuted(node: fx.Node, rows: Rows, order: list[int]) -> tuple[Rows, list[int]]:
    """Where rows come to stand, and the order of the dimensions of a piece."""
    start = order.index(rows.start)
    _check(order[start : start + rows.count] == list(range(rows.start, rows.stop)))
    inside = range(rows.start + 1, rows.stop)
    return Rows(start, rows.count), [rows.dim(dim) for dim in order if dim not in inside]


def _t(node: fx.Node, rows: Rows) -> _Moved:
    _check(rows.count == 1 and len(_shape(node)) == 2)
    return Rows(1 - rows.start), _same(node)


def _transposed(node: fx.Node, rows: Rows) -> _Moved:
    rank = len(_shape(node))
    one, other = (dim % rank for dim in node.args[1:3])  # type: ignore[operator]
    order = list(range(rank))
    order[one], order[other] = other, one
    result, _ = _permuted(node, rows, order)
    _check(rows.count == 1 or not {one, other} & set(range(rows.start, rows.stop)))
    return result, _with(node, _1=rows.dim(one), _2=rows.dim(other))


def _permute(node: fx.Node, rows: Rows) -> _Moved:
    rank = len(_shape(node))
    result, order = _permuted(node, rows, [dim % rank for dim in node.args[1]])  # type: ignore[union-attr,operator]
    return result, _with(node, _1=order)


def _unsqueezed(node: fx.Node, rows: Rows) -> _Moved:
    dim = node.args[1] % len(_shape(node))  # type: ignore[operator]
    _check(dim <= rows.start or dim >= rows.stop)
    before = dim <= rows.start
    return Rows(rows.start + before, rows.count), _with(
        node, _1=dim if before else dim - rows.count + 1
    )


def _dims(node: fx.Node, position: int, rank: int) -> list[int]:
    found = node.args[position] if len(node.args) > position else None
    listed = [found] if isinstance(found, int) else found
    return [dim % rank for dim in listed or range(rank)]  # type: ignore[operator,union-attr]


def _squeezed(node: fx.Node, rows: Rows) -> _Moved:
    shape = _shape(node.args[0])  # type: ignore[arg-type]
    dims = [_outside(dim, rows, len(shape)) for dim in _dims(node, 1, len(shape))]
    gone = [dim for dim in dims if shape[dim] == 1 and dim < rows.start]
    inside = [rows.dim(dim) for dim in dims]
    args = inside[0] if isinstance(node.args[1], int) else inside
    return Rows(rows.start - len(gone), rows.count), _with(node, _1=args)


def _along(position: int) -> Callable[[fx.Node, Rows], _Moved]:
    """A dimension is named that is none of the rows."""

    def moved(node: fx.Node, rows: Rows) -> _Moved:
        rank = len(_shape(node.args[0]))  # type: ignore[arg-type]
        named = node.args[position] if len(node.args) > position else 0
        dim = rows.dim(_outside(named, rows, rank))
        args = list(node.args)
        args[position : position + 1] = [dim]
        return rows, lambda _: tuple(args)

    return moved


def _selected(node: fx.Node, rows: Rows) -> _Moved:
    dim = _outside(node.args[1], rows, len(_shape(node)) + 1)
    return Rows(rows.start - (dim < rows.start), rows.count), _with(node, _1=rows.dim(dim))


def _put_back(node: fx.Node, rows: Rows) -> _Moved:
    """``slice_backward``: the gradient of a slice, among zeros."""
    sizes, dim = node.args[1:3]
    dim = rows.dim(_outside(dim, rows, len(_shape(node))))
    rest = node.args[3:]
    return rows, lambda many: (node.args[0], rows.sizes(sizes, many), dim, *rest)  # type: ignore[arg-type]


def _padded(node: fx.Node, rows: Rows) -> _Moved:
    _check(len(node.args[1]) // 2 <= len(_shape(node)) - rows.stop)  # type: ignore[arg-type]
    return rows, _same(node)


def _reduced(node: fx.Node, rows: Rows) -> _Moved:
    """Over other dimensions; a sum over all rows adds up over pieces."""
    rank = len(_shape(node.args[0]))  # type: ignore[arg-type]
    if node.target is aten.sum.default:
        return None, _same(node)
    dims, keeps = _dims(node, 1, rank), len(node.args) > 2 and bool(node.args[2])
    inside = [dim for dim in dims if rows.start <= dim < rows.stop]
    new = list(dict.fromkeys(rows.dim(dim) for dim in dims))
    whole = new if not isinstance(node.args[1], int) else new[0]
    if not inside:
        before = 0 if keeps else sum(dim < rows.start for dim in dims)
        return Rows(rows.start - before, rows.count), _with(node, _1=whole)
    _check(node.target is aten.sum.dim_IntList and len(inside) == rows.count)
    return None, _with(node, _1=whole)


def _behind_first(node: fx.Node, rows: Rows) -> _Moved:
    """Collectives over the first dimension."""
    _check(rows.start > 0)
    return rows, _same(node)


_LIKE_ELEMENTWISE = {
    torch_internals.WAIT, torch_internals.ALL_REDUCE, ON_FIRST, aten.full_like.default,
    aten.ones_like.default, aten.zeros_like.default,
}  # fmt: skip

RULES: dict[Any, _Rule] = {
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
    torch_internals.ALL_GATHER: _of_one(_behind_first),
    torch_internals.REDUCE_SCATTER: _of_one(_behind_first),
}
RULES |= dict.fromkeys(
    (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format), _filled
)
RULES |= dict.fromkeys(
    (aten.view.default, torch_internals.UNSAFE_VIEW, aten.reshape.default), _view
)
RULES |= dict.fromkeys(
    (
        aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
        aten.logsumexp.default, aten.argmax.default, aten.prod.dim_int, aten.any.dim,
    ),
    _of_one(_reduced),
)  # fmt: skip
_ONE: dict[Any, Callable[[fx.Node, Rows], _Moved]] = {
    aten.t.default: _t,
    aten.transpose.int: _transposed,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.slice.Tensor: _along(1),
    aten.slice_backward.default: _put_back,
    aten.select.int: _selected,
    aten.constant_pad_nd.default: _padded,
    private.SOFTMAX: _along(1),
    private.LOG_SOFTMAX: _along(1),
}
RULES |= {target: _of_one(moved) for target, moved in _ONE.items()}
