"""Redistribution as graph nodes: collectives over a named mesh dimension, and local slices.

A group is written as the name of its mesh dimension, so one Program serves every rank; lowering
binds names to process groups and slices to this rank's position. Every collective is followed by the
``wait_tensor`` that completes it.
"""

from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.program.layout import InnerShard, chunk_size
from stepgraph.program.metadata import meta

aten = torch.ops.aten

KINDS: dict[Any, str] = {
    torch_internals.ALL_GATHER: "all_gather",
    torch_internals.ALL_GATHER_INTO: "all_gather",
    torch_internals.REDUCE_SCATTER: "reduce_scatter",
    torch_internals.ALL_REDUCE: "all_reduce",
    torch_internals.ALL_TO_ALL: "all_to_all",
}
_IDENTITIES = {id(target) for target in KINDS}  # torch hashes its operators in Python


@torch.library.custom_op("stepgraph::shard_of", mutates_args=())
def shard_of(x: torch.Tensor, dim: int, ranks: int, mesh_dim: str) -> torch.Tensor:
    """This rank's part of a replicated value: ``chunk_size`` rows of ``dim``, zero-padded.

    Only a symbol: lowering replaces it by a slice at this rank's position on ``mesh_dim``.
    """
    raise RuntimeError("shard_of must be bound to a rank before it runs")


@shard_of.register_fake
def _(x: torch.Tensor, dim: int, ranks: int, mesh_dim: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = chunk_size(shape[dim], ranks)
    return x.new_empty(shape)


@torch.library.custom_op("stepgraph::on_first", mutates_args=())
def on_first(x: torch.Tensor, mesh_dim: str) -> torch.Tensor:
    """A replicated value as a pending sum: itself on the first rank of ``mesh_dim``, zero on others.

    Only a symbol, like :func:`shard_of`.
    """
    raise RuntimeError("on_first must be bound to a rank before it runs")


@on_first.register_fake
def _(x: torch.Tensor, mesh_dim: str) -> torch.Tensor:
    return torch.empty_like(x)


SHARD_OF = torch.ops.stepgraph.shard_of.default
ON_FIRST = torch.ops.stepgraph.on_first.default


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts communication between ranks."""
    return node.op == "call_function" and id(node.target) in _IDENTITIES


def communicates(node: fx.Node) -> bool:
    """:func:`is_collective`, or what a check runs in place of one."""
    return is_collective(node) or meta(node).get("stands_for") in KINDS


def mesh_dim_of(node: fx.Node) -> str:
    """The mesh dimension that a collective or a slice runs over: always its last argument."""
    return str(node.args[-1])


def redistribute(
    emit, node: fx.Node, have: Placement, want: Placement, mesh_dim: str, ranks: int, size: int
) -> fx.Node:
    """Emits the nodes that change a value's placement along one mesh dimension.

    Args:
        emit: ``emit(target, *args) -> node`` inserts one operation and computes its ``val``.
        node: the value.
        have, want: its placement now and then; the blocks of an :class:`InnerShard` as this rank has them.
        mesh_dim, ranks: the dimension and its size.
        size: global length of the sharded dimension (to remove or add padding), if there is one.
    """
    if isinstance(have, InnerShard) or isinstance(want, InnerShard):
        return _redistribute_in_blocks(emit, node, have, want, mesh_dim, ranks, size)
    match have, want:
        case Replicate(), Partial(reduce_op="sum"):
            return emit(ON_FIRST, node, mesh_dim)
        case Replicate(), Shard(dim=dim):
            return emit(SHARD_OF, node, dim, ranks, mesh_dim)
        case Shard(), Partial(reduce_op="sum"):
            whole = redistribute(emit, node, have, Replicate(), mesh_dim, ranks, size)
            return emit(ON_FIRST, whole, mesh_dim)
        case Shard(dim=dim), Replicate():
            return _all_gather(emit, node, dim, mesh_dim, ranks, size)
        case Partial(reduce_op="avg"), Partial(reduce_op="sum"):
            return emit(aten.div.Scalar, node, ranks)
        case Partial(reduce_op=op), Replicate():
            kind = "sum" if op == "avg" else op
            whole = emit(torch_internals.ALL_REDUCE, node, kind, mesh_dim)
            return _averaged(emit, emit(torch_internals.WAIT, whole), op, ranks)
        case Partial(reduce_op=op), Shard(dim=dim):
            return _averaged(emit, _reduce_scatter(emit, node, op, dim, mesh_dim, ranks), op, ranks)
        case Shard(dim=source), Shard(dim=target):
            return _all_to_all(emit, node, source, target, mesh_dim, ranks, size)
    raise NotImplementedError(f"redistribution from {have} to {want}")


def _redistribute_in_blocks(
    emit, node: fx.Node, have: Placement, want: Placement, mesh_dim: str, ranks: int, size: int
) -> fx.Node:
    """Where blocks of a dimension are sharded: their own dimension for the while, an ordinary shard."""
    shards = [p for p in (have, want) if isinstance(p, Shard)]
    alike = len({p.dim for p in shards}) < len(shards)
    if alike or all(isinstance(p, InnerShard) for p in (have, want)):
        whole = redistribute(emit, node, have, Replicate(), mesh_dim, ranks, size)
        return redistribute(emit, whole, Replicate(), want, mesh_dim, ranks, size)
    inner = have if isinstance(have, InnerShard) else want
    assert isinstance(inner, InnerShard)
    shape = list(meta(node)["val"].shape)
    shape[inner.dim : inner.dim + 1] = [inner.outer, shape[inner.dim] // inner.outer]
    blocks = emit(aten.view.default, node, shape)
    if isinstance(have, InnerShard):
        size //= inner.outer

    def beside_blocks(placement: Placement) -> Placement:
        behind = isinstance(placement, Shard) and placement.dim >= inner.dim
        return Shard(placement.dim + 1) if behind else placement  # type: ignore[attr-defined]

    moved = redistribute(
        emit, blocks, beside_blocks(have), beside_blocks(want), mesh_dim, ranks, size
    )
    shape = list(meta(moved)["val"].shape)
    shape[inner.dim : inner.dim + 2] = [shape[inner.dim] * shape[inner.dim + 1]]
    return emit(aten.view.default, moved, shape)


def _averaged(emit, node: fx.Node, op: str, ranks: int) -> fx.Node:
    return emit(aten.div.Scalar, node, ranks) if op == "avg" else node


def _swapped_with_first(emit, node: fx.Node, dim: int) -> fx.Node:
    if dim == 0:
        return node
    moved = emit(aten.transpose.int, node, 0, dim)
    return emit(aten.clone.default, moved, memory_format=torch.contiguous_format)


def contiguous(emit, node: fx.Node) -> fx.Node:
    """The node, copied where it does not lie in memory as it is indexed."""
    if meta(node)["val"].is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def _all_gather(emit, node: fx.Node, dim: int, mesh_dim: str, ranks: int, size: int) -> fx.Node:
    front = contiguous(emit, _swapped_with_first(emit, node, dim))
    gathered = emit(torch_internals.ALL_GATHER, front, ranks, mesh_dim)
    whole = emit(torch_internals.WAIT, gathered)
    if meta(whole)["val"].shape[0] != size:
        whole = emit(aten.slice.Tensor, whole, 0, 0, size)
    return _swapped_with_first(emit, whole, dim)


def _reduce_scatter(emit, node: fx.Node, op: str, dim: int, mesh_dim: str, ranks: int) -> fx.Node:
    front = _swapped_with_first(emit, node, dim)
    rows = meta(front)["val"].shape[0]
    missing = chunk_size(rows, ranks) * ranks - rows
    if missing:
        pads = [0, 0] * (meta(front)["val"].dim() - 1) + [0, missing]
        front = emit(aten.constant_pad_nd.default, front, pads, 0.0)
    front = contiguous(emit, front)
    kind = "sum" if op == "avg" else op
    scattered = emit(torch_internals.REDUCE_SCATTER, front, kind, ranks, mesh_dim)
    return _swapped_with_first(emit, emit(torch_internals.WAIT, scattered), dim)


def _all_to_all(
    emit, node: fx.Node, source: int, target: int, mesh_dim: str, ranks: int, size: int
) -> fx.Node:
    """Each rank sends to each other one its part of the new shard: what arrives is not gathered first."""
    shape = list(meta(node)["val"].shape)
    rows = chunk_size(shape[target], ranks)
    if missing := rows * ranks - shape[target]:
        pads = [0, 0] * (len(shape) - 1 - target) + [0, missing]
        node = emit(aten.constant_pad_nd.default, node, pads, 0.0)
    parts = [*shape[:target], ranks, rows, *shape[target + 1 :]]
    sent = _moved(emit, emit(aten.view.default, node, parts), target, 0)
    swapped = emit(torch_internals.ALL_TO_ALL, sent, [1] * ranks, [1] * ranks, mesh_dim)
    arrived = _moved(emit, emit(torch_internals.WAIT, swapped), 0, source)
    shape[source], shape[target] = shape[source] * ranks, rows
    whole = emit(aten.view.default, arrived, shape)
    if shape[source] != size:
        whole = emit(aten.slice.Tensor, whole, source, 0, size)
    return contiguous(emit, whole)


def _moved(emit, node: fx.Node, dim: int, to: int) -> fx.Node:
    """Dimension ``dim`` at position ``to``, in memory as well."""
    order = list(range(meta(node)["val"].dim()))
    order.insert(to, order.pop(dim))
    return contiguous(emit, node if dim == to else emit(aten.permute.default, node, order))
