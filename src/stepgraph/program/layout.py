"""The layout of a value over a mesh: its placement per mesh dimension and the local shape.

Shards are those of ``torch.chunk`` padded to equal size: a dimension of size 5 on 4 ranks is stored
as 2 + 2 + 2 + 2 rows, of which the last ranks hold padding. So one Program serves every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Placements = tuple[Placement, ...]

TENSOR_PARALLEL = "tp"


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh dimensions, outermost first: ``dp=4,tp=2``. No processes."""

    dims: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return tuple(name for name, _ in self.dims)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each dimension."""
        return tuple(size for _, size in self.dims)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """Number of ranks that hold different rows of the batch: all but those along ``tp``."""
        return math.prod(size for name, size in self.dims if name != TENSOR_PARALLEL)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a rank, row-major (the last dimension varies fastest)."""
        coordinate = []
        for size in reversed(self.sizes):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def data_rank(self, rank: int) -> int:
        """Which part of the batch a rank holds, among ``data_size``."""
        index = 0
        for (name, size), position in zip(self.dims, self.coordinate(rank), strict=True):
            if name != TENSOR_PARALLEL:
                index = index * size + position
        return index

    def groups(self, dim: str) -> list[list[int]]:
        """The groups of ranks that differ only in ``dim``."""
        axis = self.names.index(dim)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinate = self.coordinate(rank)
            groups.setdefault(coordinate[:axis] + coordinate[axis + 1 :], []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dims)


def chunk_size(size: int, ranks: int) -> int:
    """Rows that each rank stores of a dimension of ``size`` rows (the last may be padding)."""
    return -(-size // ranks)


def local_shape(shape: Sequence[int], placements: Placements, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of one rank's (padded) part of a tensor of global ``shape``."""
    local = list(shape)
    for placement, ranks in zip(placements, mesh.sizes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = chunk_size(local[placement.dim], ranks)
    return tuple(local)


def show(placements: Placements) -> str:
    """``S(0)R`` for (Shard(0), Replicate()); ``P`` is a pending sum, ``P(avg)`` another reduction."""
    return "".join(_show_one(placement) for placement in placements)


def _show_one(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return str(placement)


def replicated(mesh: MeshShape) -> Placements:
    """Replicate on every mesh dimension."""
    return (Replicate(),) * len(mesh.dims)
