"""Where values have rows, and how operations of one argument compute some of them.

Rows are tokens, most often. They are one dimension of a value or several neighbours (batch and sequence,
which are flattened on the way to a head), told by where they stand; in a piece of the rows they are one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.program.collectives import SHARD_OF
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


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
Rule = Callable[[fx.Node, Known, Rows | None], Way]


class MixesRowsError(Exception):
    """An operation does not compute its rows one by one, as far as is known here."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a value."""
    return tuple(meta(node)["val"].shape)


def require(holds: bool) -> None:
    """Raises MixesRowsError where something does not hold."""
    if not holds:
        raise MixesRowsError


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an operation, which its schema types."""
    return node.args


def unchanged(node: fx.Node) -> Callable[[int], tuple[Any, ...]]:
    """The arguments of an operation, for however many rows."""
    return lambda rows: args_of(node)


def _with(node: fx.Node, **changed: Any) -> Callable[[int], tuple[Any, ...]]:
    """The arguments of an operation, but for some: ``_1=...`` is that in position 1."""
    places = {int(name[1:]): value for name, value in changed.items()}
    args = tuple(places.get(i, argument) for i, argument in enumerate(args_of(node)))
    return lambda rows: args


def outside(dim: Any, rows: Rows, rank: int) -> int:
    """A dimension that is none of the rows, counted from the front."""
    dim %= rank
    require(not rows.start <= dim < rows.stop)
    return dim


# Of where its argument has rows: where the result has them, and the operation's arguments.
_Moved = tuple[Rows | None, Callable[[int], tuple[Any, ...]]]


def _of_one(moved: Callable[[fx.Node, Rows], _Moved]) -> Rule:
    """The rule of an operator with one tensor argument; backwards by trying where its rows may be."""

    def rule(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
        (argument,) = tensor_arguments(node)
        if argument in known:
            result, args = moved(node, known[argument])
            return Way({argument: known[argument]}, result, args)
        assert wanted is not None
        for start in range(len(shape_of(argument)) - wanted.count + 1):
            rows = Rows(start, wanted.count)
            try:
                result, args = moved(node, rows)
            except MixesRowsError:
                continue
            if result == wanted and rows.many(shape_of(argument)) == wanted.many(shape_of(node)):
                return Way({argument: rows}, result, args)
        raise MixesRowsError

    return rule


def _view(node: fx.Node, known: Known, wanted: Rows | None) -> Way:
    argument = args_of(node)[0]
    assert isinstance(argument, fx.Node)
    old, new = shape_of(argument), shape_of(node)
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
    raise MixesRowsError


def _permuted(node: fx.Node, rows: Rows, order: list[int]) -> tuple[Rows, list[int]]:
    """Where rows come to stand, and the order of the dimensions of a piece."""
    start = order.index(rows.start)
    require(order[start : start + rows.count] == list(range(rows.start, rows.stop)))
    inside = range(rows.start + 1, rows.stop)
    return Rows(start, rows.count), [rows.dim(dim) for dim in order if dim not in inside]


def _t(node: fx.Node, rows: Rows) -> _Moved:
    require(rows.count == 1 and len(shape_of(node)) == 2)
    return Rows(1 - rows.start), unchanged(node)


def _transposed(node: fx.Node, rows: Rows) -> _Moved:
    rank = len(shape_of(node))
    one, other = (dim % rank for dim in args_of(node)[1:3])
    order = list(range(rank))
    order[one], order[other] = other, one
    result, _ = _permuted(node, rows, order)
    require(rows.count == 1 or not {one, other} & set(range(rows.start, rows.stop)))
    return result, _with(node, _1=rows.dim(one), _2=rows.dim(other))


def _permute(node: fx.Node, rows: Rows) -> _Moved:
    rank = len(shape_of(node))
    result, order = _permuted(node, rows, [dim % rank for dim in args_of(node)[1]])
    return result, _with(node, _1=order)


def _unsqueezed(node: fx.Node, rows: Rows) -> _Moved:
    dim = args_of(node)[1] % len(shape_of(node))
    require(dim <= rows.start or dim >= rows.stop)
    before = dim <= rows.start
    return Rows(rows.start + before, rows.count), _with(
        node, _1=dim if before else dim - rows.count + 1
    )


def _dims(node: fx.Node, position: int, rank: int) -> list[int]:
    found = args_of(node)[position] if len(args_of(node)) > position else None
    listed = [found] if isinstance(found, int) else found
    return [dim % rank for dim in listed or range(rank)]


def _squeezed(node: fx.Node, rows: Rows) -> _Moved:
    shape = shape_of(args_of(node)[0])
    dims = [outside(dim, rows, len(shape)) for dim in _dims(node, 1, len(shape))]
    gone = [dim for dim in dims if shape[dim] == 1 and dim < rows.start]
    inside = [rows.dim(dim) for dim in dims]
    args = inside[0] if isinstance(args_of(node)[1], int) else inside
    return Rows(rows.start - len(gone), rows.count), _with(node, _1=args)


def _along(position: int) -> Callable[[fx.Node, Rows], _Moved]:
    """A dimension is named that is none of the rows."""

    def moved(node: fx.Node, rows: Rows) -> _Moved:
        rank = len(shape_of(args_of(node)[0]))
        named = args_of(node)[position] if len(args_of(node)) > position else 0
        dim = rows.dim(outside(named, rows, rank))
        args = list(args_of(node))
        args[position : position + 1] = [dim]
        return rows, lambda _: tuple(args)

    return moved


def _selected(node: fx.Node, rows: Rows) -> _Moved:
    dim = outside(args_of(node)[1], rows, len(shape_of(node)) + 1)
    return Rows(rows.start - (dim < rows.start), rows.count), _with(node, _1=rows.dim(dim))


def _put_back(node: fx.Node, rows: Rows) -> _Moved:
    """``slice_backward``: the gradient of a slice, among zeros."""
    sizes, dim = args_of(node)[1:3]
    dim = rows.dim(outside(dim, rows, len(shape_of(node))))
    rest = args_of(node)[3:]
    return rows, lambda many: (args_of(node)[0], rows.sizes(sizes, many), dim, *rest)


def _padded(node: fx.Node, rows: Rows) -> _Moved:
    require(len(args_of(node)[1]) // 2 <= len(shape_of(node)) - rows.stop)
    return rows, unchanged(node)


def _reduced(node: fx.Node, rows: Rows) -> _Moved:
    """Over other dimensions; a sum over all rows adds up over pieces."""
    rank = len(shape_of(args_of(node)[0]))
    if node.target is aten.sum.default:
        return None, unchanged(node)
    dims, keeps = _dims(node, 1, rank), len(args_of(node)) > 2 and bool(args_of(node)[2])
    inside = [dim for dim in dims if rows.start <= dim < rows.stop]
    new = list(dict.fromkeys(rows.dim(dim) for dim in dims))
    whole = new if not isinstance(args_of(node)[1], int) else new[0]
    if not inside:
        before = 0 if keeps else sum(dim < rows.start for dim in dims)
        return Rows(rows.start - before, rows.count), _with(node, _1=whole)
    require(node.target is aten.sum.dim_IntList and len(inside) == rows.count)
    return None, _with(node, _1=whole)


def _behind_first(node: fx.Node, rows: Rows) -> _Moved:
    """Collectives over the first dimension."""
    require(rows.start > 0)
    return rows, unchanged(node)


_MOVED: dict[Any, Callable[[fx.Node, Rows], _Moved]] = {
    torch_internals.ALL_GATHER: _behind_first,
    torch_internals.REDUCE_SCATTER: _behind_first,
    SHARD_OF: _along(1),
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
_MOVED |= dict.fromkeys(
    (
        aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
        aten.logsumexp.default, aten.argmax.default, aten.prod.dim_int, aten.any.dim,
    ),
    _reduced,
)  # fmt: skip
ONE: dict[Any, Rule] = {target: _of_one(moved) for target, moved in _MOVED.items()}
ONE |= dict.fromkeys((aten.view.default, torch_internals.UNSAFE_VIEW, aten.reshape.default), _view)
