"""The ways of each operator for :mod:`stepgraph.operators.every_way`: a rule yields them, whole ones aside.

A rule takes a node and its results' fake values. What it yields is right for any number of ranks that
divides the dimensions that it shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators.table import overloads
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

# Placements of each tensor argument, and of each result.
Way = tuple[tuple[Placement, ...], tuple[Placement | None, ...]]

WHOLE, _SUM = Replicate(), Partial("sum")


# -------------------------------------------------------------------------------- element by element


def element_by_element(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Shards of any dimension, arguments aligned at the right; sums that wait, as far as it is linear."""
    values = [meta(argument)["val"] for argument in tensor_arguments(node)]
    rank = results[0].dim()
    for dim in range(rank):
        aligned = [(value, dim - rank + value.dim()) for value in values]
        size = results[0].shape[dim]
        parts = (own >= 0 and value.shape[own] == size for value, own in aligned)
        inputs = (
            Shard(own) if part else WHOLE for part, (_, own) in zip(parts, aligned, strict=True)
        )
        yield tuple(inputs), (Shard(dim),) * len(results)
    for inputs in _PENDING.get(node.target, "").split():
        *read, _, made = (_LETTERS[letter] for letter in inputs)
        if len(read) == len(values):
            yield tuple(read), (made,)


_LETTERS: dict[str, Any] = {
    "s": _SUM, "a": Partial("avg"), "x": Partial("max"), "n": Partial("min"), "r": WHOLE, ">": None,
}  # fmt: skip

_LINEAR = "s>s a>a"
_RISING = "x>x n>n"
_RISING_IN_BOTH = "xr>x rx>x nr>n rn>n"

# What may wait as a reduction, argument by argument, and what the result then waits for: s(um), a(verage),
# (ma)x, (mi)n; r is whole. A number among the arguments is no tensor, so that one of them is left.
_PENDING: dict[Any, str] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), "ss>s aa>a ar>a xr>x nr>n ra>a"),
    aten.mul.Tensor: f"{_LINEAR} sr>s ar>a rs>s ra>a",
    aten.div.Tensor: f"{_LINEAR} sr>s ar>a",
    **dict.fromkeys((aten.mul.Scalar, aten.div.Scalar), _LINEAR),
    aten.neg.default: f"{_LINEAR} x>n n>x",
    **dict.fromkeys((aten.exp.default, aten.relu.default, aten.sigmoid.default), _RISING),
    **dict.fromkeys((aten.tanh.default, aten.erf.default, aten.sign.default), _RISING),
    **dict.fromkeys((aten.maximum.default, aten.clamp_min.Tensor), f"{_RISING_IN_BOTH} xx>x"),
    **dict.fromkeys((aten.minimum.default, aten.clamp_max.Tensor), f"{_RISING_IN_BOTH} nn>n"),
}


# -------------------------------------------------------------------------- along dimensions that stay


def _along(dims: Iterable[int], arguments: int, results: int) -> Iterable[Way]:
    """The same shard of every argument and result."""
    for dim in dims:
        yield (Shard(dim),) * arguments, (Shard(dim),) * results


def _waiting(kinds: Iterable[str], inputs: str, outputs: str = "p") -> Iterable[Way]:
    """Reductions that pass through: of what is ``p``; the rest is whole."""
    for kind in kinds:
        letters = {"p": Partial(kind), "r": WHOLE}
        yield tuple(letters[x] for x in inputs), tuple(letters[x] for x in outputs)


_ANY = ("sum", "avg", "min", "max")
_SUMS = _ANY[:2]


def _cast(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Casts: what was rounded to integers is no sum any more, what was made a truth nothing."""
    yield from _along(range(results[0].dim()), 1, 1)
    before, after = meta(tensor_arguments(node)[0])["val"].dtype, results[0].dtype
    rounds = before.is_floating_point and not after.is_floating_point
    if before == after or after != torch.bool:
        yield from _waiting(_ANY[2:] if rounds else _ANY, "p")


def _padded(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Shards of a dimension that nothing is added to; a sum of what is added is not that."""
    padding: Any = node.args[1]
    rank = results[0].dim()
    added = {rank - 1 - i // 2 for i, size in enumerate(padding) if size}
    yield from _along((dim for dim in range(rank) if dim not in added), 1, 1)
    value = node.args[2] if len(node.args) > 2 else 0
    yield from _waiting(_ANY if not added or value == 0 else _ANY[1:], "p")


def _moved(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Flip and roll: along what they leave alone."""
    rank, position = results[0].dim(), 2 if node.target is aten.roll.default else 1
    given: Any = node.args[position] if len(node.args) > position else []
    touched = {dim % rank for dim in given} or set(range(rank))
    yield from _along((dim for dim in range(rank) if dim not in touched), 1, 1)
    yield from _waiting(_ANY, "p")


def _largest_along(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Maximum and its position along a dimension: shards of the others."""
    rank = meta(tensor_arguments(node)[0])["val"].dim()
    along: Any = node.args[1]
    kept = len(node.args) > 2 and node.args[2]
    for dim in range(rank):
        if dim != along % rank:
            own = dim if kept or dim < along % rank else dim - 1
            yield (Shard(dim),), (Shard(own), Shard(own))


# ------------------------------------------------------------------------------- norms and convolutions


def _rows_before(node: fx.Node, position: int) -> range:
    """Dimensions before those that a norm is taken over."""
    over: Any = node.args[position]
    return range(meta(tensor_arguments(node)[0])["val"].dim() - len(over))


def _row_norm(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    weights = len(tensor_arguments(node)) - 1
    for dim in _rows_before(node, 1):
        yield (Shard(dim), *[WHOLE] * weights), (Shard(dim),) * len(results)


def _row_norm_backward(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Rows of the gradient, the input and the statistics; of the weights, sums."""
    statistics = 2 if node.target is aten.native_layer_norm_backward.default else 1
    weights: Any = node.args[3 + statistics : 3 + statistics + len(results) - 1]
    sums = (_SUM if weight is not None else None for weight in weights)
    outputs = tuple(sums)
    whole = [WHOLE] * sum(weight is not None for weight in weights)
    for dim in _rows_before(node, 2):
        yield (*[Shard(dim)] * (2 + statistics), *whole), (Shard(dim), *outputs)


def _group_norm(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    yield (Shard(0), *[WHOLE] * (len(tensor_arguments(node)) - 1)), (Shard(0),) * 3


def _batch_norm(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """By channels; the statistics of rows are of all of them."""
    inputs = [Shard(1), *[Shard(0)] * (len(tensor_arguments(node)) - 1)]
    yield tuple(inputs), (Shard(1), *[Shard(0)] * (len(results) - 1))


def _batch_norm_backward(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    others = [Shard(0)] * (len(tensor_arguments(node)) - 2)
    yield (Shard(1), Shard(1), *others), (Shard(1), Shard(0), Shard(0))


def _convolution(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    yield (Shard(0), *[WHOLE] * (len(tensor_arguments(node)) - 1)), (Shard(0),)


def _convolution_backward(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    yield (Shard(0), Shard(0), WHOLE), (Shard(0), _SUM, _SUM if node.args[3] is not None else None)


def _pooled(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """By images and channels."""
    arguments = len(tensor_arguments(node))
    yield from _along(range(2 if results[0].dim() > 3 else 1), arguments, len(results))
    if node.target in _AVERAGES:
        yield from _waiting(_SUMS, "p")


def _pooled_backward(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """By images and channels; gradients are added up after it as well as before."""
    yield from _along(range(2 if results[0].dim() > 3 else 1), 3, 1)
    yield from _waiting(_SUMS, "prr")


def _resized(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Upsampling, which is linear, and its backward."""
    yield from _along(range(2), 1, 1)
    yield from _waiting(_SUMS, "p")


# ------------------------------------------------------------------------------------ dimensions that go


def _reduced(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Reductions over some dimensions that cannot be put together from parts: shards of the others."""
    rank = meta(tensor_arguments(node)[0])["val"].dim()
    given: Any = node.args[1] if len(node.args) > 1 else None
    gone = {dim % rank for dim in given} if given else set(range(rank))
    kept = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2])
    for dim in (dim for dim in range(rank) if dim not in gone):
        own = dim if kept else dim - sum(other < dim for other in gone)
        yield (Shard(dim),), (Shard(own),) * len(results)


def _squeezed(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Dimensions of size one go; the others stay in order."""
    shape, given = meta(tensor_arguments(node)[0])["val"].shape, node.args[1]
    gone = [dim % len(shape) for dim in given]  # type: ignore[union-attr]
    stays = [dim for dim in range(len(shape)) if dim not in gone or shape[dim] != 1]
    for own, dim in enumerate(stays):
        yield (Shard(dim),), (Shard(own),)
    yield from _waiting(_ANY, "p")


# ---------------------------------------------------------------------------------------- by an index


def _indexed(node: fx.Node) -> tuple[list[Any], int, dict[int, int]]:
    """Of ``x[indices]``: index tensors, where theirs stand in the result, and where x's other dims do."""
    value, indices = meta(node.args[0])["val"], node.args[1]  # type: ignore[union-attr]
    at = [dim for dim, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    found = [meta(indices[dim])["val"] for dim in at]  # type: ignore[index]
    rank = max(index.dim() for index in found)
    together = at[-1] - at[0] + 1 == len(at)
    first = at[0] if together else 0
    stays = {}
    for dim in (d for d in range(value.dim()) if d not in at):
        stays[dim] = dim if dim < first else dim + rank - sum(dim > i for i in at)
    return found, first, stays


def _picked(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Parts of what the index does not touch, or of the index."""
    indices, first, stays = _indexed(node)
    for dim, own in stays.items():
        yield (Shard(dim), *[WHOLE] * len(indices)), (Shard(own),)
    rank = max(index.dim() for index in indices)
    for dim in range(rank):
        own = [(index, dim - rank + index.dim()) for index in indices]
        parts = [Shard(d) if d >= 0 and index.shape[d] > 1 else WHOLE for index, d in own]
        if any(isinstance(part, Shard) for part in parts):
            yield (WHOLE, *parts), (Shard(first + dim),)
    yield from _waiting(_SUMS, "p" + "r" * len(indices))


def _put(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """Parts of what the index does not touch: a row of another rank is none of this one's."""
    indices, _, stays = _indexed(node)
    written = meta(node.args[2])["val"]  # type: ignore[union-attr]
    rank = max(index.dim() for index in indices) + len(stays)
    for dim, place in stays.items():
        own = place - rank + written.dim()
        part = Shard(own) if own >= 0 and written.shape[own] > 1 else WHOLE
        yield (Shard(dim), *[WHOLE] * len(indices), part), (Shard(dim),)
    yield from _waiting(["sum"], "p" + "r" * len(indices) + "p")


def _selected(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    along = node.args[1] % results[0].dim()  # type: ignore[operator]
    for dim in range(results[0].dim()):
        if dim != along:
            yield (Shard(dim), WHOLE), (Shard(dim),)
    yield (WHOLE, Shard(0)), (Shard(along),)
    yield from _waiting(_ANY, "pr")


def _put_at(node: fx.Node, results: list[Any]) -> Iterable[Way]:
    """One slice of a value: along its other dimensions."""
    at = node.args[2] % results[0].dim()  # type: ignore[operator]
    for dim in range(results[0].dim()):
        if dim != at:
            yield (Shard(dim), Shard(dim if dim < at else dim - 1)), (Shard(dim),)


RULES: dict[Any, Callable[[fx.Node, list[Any]], Iterable[Way]]] = {
    private.TO_COPY: _cast,
    aten.constant_pad_nd.default: _padded,
    aten.flip.default: _moved,
    aten.roll.default: _moved,
    aten.max.dim: _largest_along,
    aten.min.dim: _largest_along,
    aten.native_layer_norm.default: _row_norm,
    aten.native_layer_norm_backward.default: _row_norm_backward,
    private.FUSED_RMS_NORM: _row_norm,
    private.FUSED_RMS_NORM_BACKWARD: _row_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_batch_norm.default: _batch_norm,
    private.BATCH_NORM_FUNCTIONAL: _batch_norm,
    private.BATCH_NORM_FROZEN: _batch_norm,
    private.BATCH_NORM_WITHOUT_BUFFERS: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices_backward.default: _pooled_backward,
    **dict.fromkeys(
        overloads(
            aten.upsample_nearest2d,
            aten.upsample_nearest2d_backward,
            aten.upsample_bilinear2d,
            aten.upsample_bilinear2d_backward,
        ),
        _resized,
    ),  # fmt: skip
    aten.index.Tensor: _picked,
    aten.index_put.default: _put,
    aten.index_select.default: _selected,
    aten.select_scatter.default: _put_at,
}

_AVERAGES = (aten.avg_pool2d.default, private.ADAPTIVE_AVERAGE_POOL)

# What older releases have no rule at all for.
WHERE_TORCH_HAS_NONE: dict[Any, Callable[[fx.Node, list[Any]], Iterable[Way]]] = {
    aten.squeeze.dims: _squeezed,
    aten.var_mean.correction: _reduced,
    aten.any.dims: _reduced,
    aten.max_pool2d_with_indices.default: _pooled,
    **dict.fromkeys((*_AVERAGES, private.ADAPTIVE_AVERAGE_POOL_BACKWARD), _pooled),
}
