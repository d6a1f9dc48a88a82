"""Slicing tensors into ranks' parts and joining them again, on real values."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.program.layout import InnerShard, MeshShape, Placements, blocks_held, chunk_size

REDUCTIONS = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0) / stack.shape[0],
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def local_part(
    value: torch.Tensor, placements: Placements, mesh: MeshShape, rank: int
) -> torch.Tensor:
    """One rank's (zero-padded) part of a global tensor; a pending sum is whole on the first rank."""
    for axis, placement in enumerate(placements):
        index = mesh.coordinate(rank)[axis]
        if isinstance(placement, InnerShard):
            blocks = blocks_held(placement, list(zip(placements[:axis], mesh.sizes, strict=False)))
            parts = slice_of(
                _in_blocks(value, placement.dim, blocks), placement.dim + 1, mesh.sizes[axis], index
            )
            value = parts.flatten(placement.dim, placement.dim + 1)
        elif isinstance(placement, Shard):
            value = slice_of(value, placement.dim, mesh.sizes[axis], index)
        elif isinstance(placement, Partial) and index:
            value = torch.zeros_like(value)
    return value


def split(value: torch.Tensor, placements: Placements, mesh: MeshShape) -> list[torch.Tensor]:
    """All ranks' local parts of a global tensor, each its own memory."""
    ranks = range(mesh.world_size)
    return [local_part(value, placements, mesh, rank).clone() for rank in ranks]


def _in_blocks(value: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    return value.unflatten(dim, (blocks, -1))


def rows_held(size: int, ranks: int, index: int) -> int:
    """How many of ``chunk_size`` rows of rank ``index`` are not padding."""
    rows = chunk_size(size, ranks)
    return max(0, min(rows, size - index * rows))


def slice_of(value: torch.Tensor, dim: int, ranks: int, index: int) -> torch.Tensor:
    """Rank ``index``'s part of a whole tensor: equal rows of ``dim``, zero-padded at the end."""
    rows = chunk_size(value.shape[dim], ranks)
    start = min(index * rows, value.shape[dim])
    part = value.narrow(dim, start, min(rows, value.shape[dim] - start))
    if part.shape[dim] == rows:
        return part.contiguous()
    shape = list(part.shape)
    shape[dim] = rows - shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def join(
    parts: Sequence[torch.Tensor], shape: Sequence[int], placements: Placements, mesh: MeshShape
) -> torch.Tensor:
    """The global tensor that local parts stand for; replicas must agree bit for bit.

    Raises:
        AssertionError: if ranks that hold the same replica differ.
    """
    held = {mesh.coordinate(rank): part for rank, part in enumerate(parts)}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        merged: dict[tuple[int, ...], torch.Tensor] = {}
        for prefix in dict.fromkeys(key[:axis] for key in held):
            members = [held[(*prefix, i)] for i in range(mesh.sizes[axis])]
            if isinstance(placement, InnerShard):
                before = list(zip(placements[:axis], mesh.sizes, strict=False))
                blocks, dim = blocks_held(placement, before), placement.dim
                parts = [_in_blocks(member, dim, blocks) for member in members]
                merged[prefix] = torch.cat(parts, dim + 1).flatten(dim, dim + 1)
            elif isinstance(placement, Shard):
                merged[prefix] = torch.cat(members, placement.dim)
            elif isinstance(placement, Partial):
                merged[prefix] = REDUCTIONS[placement.reduce_op](torch.stack(members))
            else:
                assert isinstance(placement, Replicate)
                same = all(torch.equal(members[0], m) or _both_nan(members[0], m) for m in members)
                assert same, "ranks that hold the same replica differ"
                merged[prefix] = members[0]
        held = merged
    whole = held[()]
    for dim, size in enumerate(shape):
        whole = whole.narrow(dim, 0, size)
    return whole


def _both_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())
