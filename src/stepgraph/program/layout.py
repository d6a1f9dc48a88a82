"""The layout of a value over a mesh: its placement per mesh dimension and the local shape.

Shards are those of ``torch.chunk`` padded to equal size: a dimension of size 5 on 4 ranks is stored
as 2 + 2 + 2 + 2 rows, of which the last ranks hold padding. So one Program serves every rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.program.mesh_roles import Role, role_of

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Apart:
    """A value that cannot be had from what slices of the batch have, or is of each slice alone."""

    reason: str = field(compare=False)


Spread = Placement | Apart  # how slices of a batch have a value


class InnerShard(Shard):
    """A shard of the inner part of a dimension that is two flattened into one, (outer, inner).

    So is a batch that is sharded once (sequence, batch) has been flattened, and heads once (batch, heads)
    has: each rank holds its slice of every one of the ``outer`` blocks. torch calls it ``_StridedShard``.
    """

    def __init__(self, dim: int, outer: int) -> None:
        super().__init__(dim)
        self.outer = outer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InnerShard) and (self.dim, self.outer) == (other.dim, other.outer)

    def __hash__(self) -> int:
        return hash((self.dim, self.outer))

    def __reduce__(self) -> tuple:
        return InnerShard, (self.dim, self.outer)

    def __repr__(self) -> str:
        return f"InnerShard(dim={self.dim}, outer={self.outer})"


def from_torch(placement: Placement) -> Placement:
    """torch's own placement in the words of a Program."""
    if isinstance(placement, torch_internals.StridedShard):
        return InnerShard(placement.dim, int(placement.split_factor))
    return placement


def to_torch(placement: Placement) -> Placement:
    """The inverse of :func:`from_torch`."""
    if isinstance(placement, InnerShard):
        return torch_internals.StridedShard(placement.dim, split_factor=placement.outer)
    return placement


def blocks_of(placement: Placement) -> int:
    """How many blocks a shard takes its slices from: 1, or the outer size of an :class:`InnerShard`."""
    return placement.outer if type(placement) is InnerShard else 1


class SplitBlockError(ValueError):
    """Two mesh dimensions would shard one dimension so that a block of one lies on several of the other."""


def blocks_held(placement: Placement, others: Sequence[tuple[Placement, int]]) -> int:
    """:func:`blocks_of`, counted on a rank where ``others`` (placement, ranks) are applied too."""
    blocks = blocks_of(placement)
    for other, ranks in others:
        shared = isinstance(other, Shard) and other.dim == getattr(placement, "dim", None)
        if shared and blocks_of(other) < blocks_of(placement):
            if blocks % ranks:
                raise SplitBlockError(f"{other} on {ranks} ranks splits a block of {placement}")
            blocks //= ranks
    return blocks


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh dimensions, outermost first: ``dp=4,tp=2``. No processes.

    Each has a role (:class:`stepgraph.program.mesh_roles.Role`); a name without one is a MeshError.
    """

    dims: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name in self.names:
            role_of(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return tuple(name for name, _ in self.dims)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the dimensions."""
        return tuple(role_of(name) for name in self.names)

    def axis_of(self, role: Role) -> int | None:
        """Which dimension has a role, if one has."""
        return self.roles.index(role) if role in self.roles else None

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
        """Number of ranks that hold different rows of the batch."""
        pairs = zip(self.roles, self.sizes, strict=True)
        return math.prod(size for role, size in pairs if role.divides_batch)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a rank, row-major (the last dimension varies fastest)."""
        coordinate = []
        for size in reversed(self.sizes):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def position(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank by mesh dimension."""
        return dict(zip(self.names, self.coordinate(rank), strict=True))

    def data_rank(self, rank: int) -> int:
        """Which part of the batch a rank holds, among ``data_size``."""
        index = 0
        for role, size, position in zip(self.roles, self.sizes, self.coordinate(rank), strict=True):
            if role.divides_batch:
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


def data_mesh(ranks: int) -> MeshShape:
    """The mesh of ranks that hold different rows, and nothing else."""
    return MeshShape(((Role.DATA.dim, ranks),))


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
    """``S(0)R`` for (Shard(0), Replicate()); ``P`` is a pending sum, ``P(avg)`` another reduction.

    ``S(0/6)`` is an :class:`InnerShard` of 6 blocks.
    """
    return "".join(_show_one(placement) for placement in placements)


def _show_one(placement: Placement) -> str:
    if type(placement) is Replicate:
        return "R"
    if isinstance(placement, Shard):
        blocks = blocks_of(placement)
        return f"S({placement.dim})" if blocks == 1 else f"S({placement.dim}/{blocks})"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return str(placement)


def replicated(mesh: MeshShape) -> Placements:
    """Replicate on every mesh dimension."""
    return (Replicate(),) * len(mesh.dims)
