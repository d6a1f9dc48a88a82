"""Batch and group norm in operations whose rules know that the batch is sharded.

Batch norm mixes rows of the batch: its statistics are sums over all of them. DTensor's rules keep the
fused operators whole, or shard them by channels, and every activation would travel; as sums and
elementwise work, two numbers per channel do.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.program.build import Builder
from stepgraph.program.layout import MeshShape
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@program_pass(
    reads="the fused operators of :data:`_SPELLED`, whose results are taken by ``getitem``",
    writes="sums and elementwise operations in their place",
    preserves=SUMMATION,
)
def spell_out_norms(program: Program, mesh: MeshShape) -> Program:
    """Batch norm, its backward and group norm's backward as sums, products and differences."""
    if mesh.data_size == 1:
        return program
    for node in list(program.operations()):
        if node.target not in _SPELLED:
            continue
        emit = Builder(program, meta(node)["phase"], node)
        emit.module = meta(node)["module"]
        results = _SPELLED[node.target](emit, *node.args, **node.kwargs)
        for reader in list(node.users):
            reader.replace_all_uses_with(results[reader.args[1]])  # type: ignore[arg-type]
            program.graph.erase_node(reader)
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    return program.finish()


def _value(node: fx.Node) -> torch.Tensor:
    return meta(node)["val"]


def _wide(emit: Builder, node: fx.Node) -> fx.Node:
    """Statistics of half-precision values are kept in float32, as torch's kernels keep them."""
    return emit.cast(node, torch.promote_types(_value(node).dtype, torch.float32))


class _Channels:
    """What is per channel (dimension 1), beside an input (N, C, ...)."""

    def __init__(self, emit: Builder, like: fx.Node) -> None:
        shape = _value(like).shape
        self.emit = emit
        self.dims = [0, *range(2, len(shape))]
        self.count = _value(like).numel() // shape[1]
        self.shape = [1, shape[1], *[1] * (len(shape) - 2)]

    def sum(self, node: fx.Node) -> fx.Node:
        """[C]: over everything else."""
        return self.emit(aten.sum.dim_IntList, node, self.dims)

    def mean(self, node: fx.Node) -> fx.Node:
        """[C]: over everything else."""
        return self.emit(aten.div.Scalar, self.sum(node), self.count)

    def spread(self, node: fx.Node) -> fx.Node:
        """[1, C, 1, ...], to be broadcast."""
        return self.emit(aten.view.default, node, self.shape)


def _inverse_deviation(emit: Builder, variance: fx.Node, eps: float) -> fx.Node:
    return emit(aten.rsqrt.default, emit(aten.add.Scalar, variance, eps))


def _normalised(
    channels: _Channels, x: fx.Node, mean: fx.Node, inverse: fx.Node, weight: Any, bias: Any
) -> fx.Node:
    emit = channels.emit
    result = emit(aten.sub.Tensor, _wide(emit, x), channels.spread(mean))
    result = emit(aten.mul.Tensor, result, channels.spread(inverse))
    if weight is not None:
        result = emit(aten.mul.Tensor, result, channels.spread(_wide(emit, weight)))
    if bias is not None:
        result = emit(aten.add.Tensor, result, channels.spread(_wide(emit, bias)))
    return emit.cast(result, _value(x).dtype)


def _moved(emit: Builder, running: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    """A running statistic after this batch."""
    kept = emit(aten.mul.Scalar, running, 1 - momentum)
    added = emit(aten.mul.Scalar, emit.cast(new, _value(running).dtype), momentum)
    return emit(aten.add.Tensor, kept, added)


def _batch_norm(
    emit: Builder, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, eps: float,
) -> list:  # fmt: skip
    """(result, mean, 1 / deviation, new running mean, new running variance)."""
    channels = _Channels(emit, x)
    if not training:
        inverse = _inverse_deviation(emit, _wide(emit, variance), eps)
        result = _normalised(channels, x, _wide(emit, mean), inverse, weight, bias)
        return [result, None, None, mean, variance]
    wide = _wide(emit, x)
    batch_mean = channels.mean(wide)
    centred = emit(aten.sub.Tensor, wide, channels.spread(batch_mean))
    batch_variance = channels.mean(emit(aten.mul.Tensor, centred, centred))
    inverse = _inverse_deviation(emit, batch_variance, eps)
    result = _normalised(channels, x, batch_mean, inverse, weight, bias)
    if mean is None:
        return [result, batch_mean, inverse]
    unbiased = emit(aten.mul.Scalar, batch_variance, channels.count / max(channels.count - 1, 1))
    new_mean = _moved(emit, mean, batch_mean, momentum)
    new_variance = _moved(emit, variance, unbiased, momentum)
    return [result, batch_mean, inverse, new_mean, new_variance]


def _batch_norm_with_reserve(
    emit: Builder, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any
) -> list:
    results = _batch_norm(emit, x, weight, bias, mean, variance, True, *rest)
    reserve = emit(aten.empty.memory_format, [0], dtype=torch.uint8, device=_value(x).device)
    return [*results[:3], reserve, *results[3:]]


def _batch_norm_backward(
    emit: Builder, gradient: Any, x: Any, weight: Any, mean: Any, variance: Any, batch_mean: Any,
    inverse: Any, training: bool, eps: float, wanted: Any, reserve: Any = None,
) -> list:  # fmt: skip
    """Gradients of (input, weight, bias)."""
    channels = _Channels(emit, x)
    if not training:
        batch_mean = _wide(emit, mean)
        inverse = _inverse_deviation(emit, _wide(emit, variance), eps)
    dy, wide = _wide(emit, gradient), _wide(emit, x)
    centred = emit(aten.sub.Tensor, wide, channels.spread(batch_mean))
    normal = emit(aten.mul.Tensor, centred, channels.spread(inverse))
    to_bias = channels.sum(dy)
    to_weight = channels.sum(emit(aten.mul.Tensor, dy, normal))
    dx = dy
    if training:
        mean_dy = emit(aten.div.Scalar, to_bias, channels.count)
        mean_product = emit(aten.div.Scalar, to_weight, channels.count)
        along = emit(aten.mul.Tensor, normal, channels.spread(mean_product))
        dx = emit(aten.sub.Tensor, dy, channels.spread(mean_dy))
        dx = emit(aten.sub.Tensor, dx, along)
    scale = inverse
    if weight is not None:
        scale = emit(aten.mul.Tensor, inverse, _wide(emit, weight))
    dx = emit(aten.mul.Tensor, dx, channels.spread(scale))
    kind = _value(x).dtype if weight is None else _value(weight).dtype
    return [emit.cast(dx, _value(x).dtype), emit.cast(to_weight, kind), emit.cast(to_bias, kind)]


def _group_norm_backward(
    emit: Builder, gradient: Any, x: Any, mean: Any, inverse: Any, weight: Any, rows: int,
    count: int, size: int, groups: int, wanted: Any,
) -> list:  # fmt: skip
    """Gradients of (input, weight, bias); every row has its own statistics, one pair a group."""
    grouped = [rows, groups, count // groups, size]

    def split(node: fx.Node) -> fx.Node:
        node = _wide(emit, node)
        if not _value(node).is_contiguous():
            node = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
        return emit(aten.view.default, node, grouped)

    def spread(node: fx.Node, shape: list[int]) -> fx.Node:
        return emit(aten.view.default, _wide(emit, node), shape)

    dy = split(gradient)
    centred = emit(aten.sub.Tensor, split(x), spread(mean, [rows, groups, 1, 1]))
    normal = emit(aten.mul.Tensor, centred, spread(inverse, [rows, groups, 1, 1]))
    to_bias = emit(aten.sum.dim_IntList, dy, [0, 3])
    to_weight = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, dy, normal), [0, 3])
    if weight is not None:
        dy = emit(aten.mul.Tensor, dy, spread(weight, [1, groups, count // groups, 1]))
    share = 1.0 / (count // groups * size)
    along = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, dy, normal), [2, 3], True)
    along = emit(aten.mul.Tensor, normal, emit(aten.mul.Scalar, along, share))
    level = emit(aten.mul.Scalar, emit(aten.sum.dim_IntList, dy, [2, 3], True), share)
    dx = emit(aten.sub.Tensor, emit(aten.sub.Tensor, dy, level), along)
    dx = emit(aten.mul.Tensor, dx, spread(inverse, [rows, groups, 1, 1]))
    dx = emit(aten.view.default, dx, list(_value(x).shape))
    kind = _value(x).dtype if weight is None else _value(weight).dtype
    to_weight, to_bias = (
        emit.cast(emit(aten.view.default, total, [count]), kind) for total in (to_weight, to_bias)
    )
    return [emit.cast(dx, _value(x).dtype), to_weight, to_bias]


_SPELLED: dict[Any, Callable[..., list]] = {
    private.BATCH_NORM_FUNCTIONAL: _batch_norm,
    private.BATCH_NORM_FROZEN: (
        lambda emit, x, w, b, mean, var, *rest: _batch_norm(emit, x, w, b, mean, var, False, *rest)
    ),
    private.BATCH_NORM_WITHOUT_BUFFERS: (
        lambda emit, x, w, b, *rest: _batch_norm(emit, x, w, b, None, None, *rest)
    ),
    private.BATCH_NORM_WITH_RESERVE: _batch_norm_with_reserve,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
