"""Fused projections, of which each rank has a slice of every part: queries, keys and values of its heads.

One product makes several parts side by side, and a split takes them apart. A slice of the whole would hold
some of one part and nothing of another; slices of each of its blocks (:class:`InnerShard`) are slices of
each part. The backward joins the parts' gradients to such blocks again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators.entries import Entry, Strategy
from stepgraph.program.layout import InnerShard, MeshShape, Placements, blocks_of, local_shape
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments

aten = torch.ops.aten

_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


def parts_of_split(node: fx.Node) -> tuple[int, int] | None:
    """(dimension, how many parts) that a split makes, if they are equal; None for other operations."""
    if node.target not in _SPLITS:
        return None
    sizes = {tuple(part.shape) for part in meta(node)["val"]}
    return (_dim(node, 2), len(meta(node)["val"])) if len(sizes) == 1 else None


def _split(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Of blocks: every part is sharded as its blocks are."""
    place, parts = placements[0], parts_of_split(node)
    if parts is None or not isinstance(place, InnerShard) or place.dim != parts[0]:
        return []
    blocks, rest = divmod(place.outer, parts[1])
    return [] if rest else [Strategy((place,), (shard_of(place.dim, blocks),) * parts[1])]


def _joined(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """The inverse."""
    place, dim = placements[0], _dim(node, 1)
    values = [meta(argument)["val"] for argument in tensor_arguments(node)]
    alike = set(placements) == {place} and len({tuple(value.shape) for value in values}) == 1
    if not alike or not isinstance(place, Shard) or place.dim != dim:
        return []
    return [Strategy(placements, (InnerShard(dim, blocks_of(place) * len(values)),))]


def shard_of(dim: int, blocks: int) -> Shard:
    """A shard of each of so many blocks of a dimension."""
    return Shard(dim) if blocks == 1 else InnerShard(dim, blocks)


def _dim(node: fx.Node, position: int) -> int:
    """The dimension that a split or a concatenation is along."""
    given: Any = node.args[position] if len(node.args) > position else 0
    return given % meta(tensor_arguments(node)[0])["val"].dim()


STRATEGIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_SPLITS, _split),
    aten.cat.default: _joined,
}


def local_sizes(
    node: fx.Node, args: tuple, outputs: tuple[Placements | None, ...], mesh: MeshShape
) -> tuple:
    """The arguments of a split on one rank: sizes are those of this rank's parts."""
    dim, parts = _dim(node, 2), meta(node)["val"]
    sizes = [
        local_shape(part.shape, placements or (), mesh)[dim] if placements else part.shape[dim]
        for part, placements in zip(parts, outputs, strict=True)
    ]
    return (args[0], sizes[0] if node.target is aten.split.Tensor else sizes, *args[2:])


def is_split(node: fx.Node) -> bool:
    """Whether an operation's sizes are those of its parts."""
    return node.target in _SPLITS
