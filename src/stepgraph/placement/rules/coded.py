"""Placements as numbers: which of thousands fit a shape, at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.program.layout import Placements, blocks_of

WHOLE, PENDING, SHARDED = 0, 1, 2


class Coded:
    """Placements as arrays ``[how many, mesh dimensions]``: questions about thousands take no time.

    ``kind``: whole, pending or sharded. ``dim``: that is sharded, or the number of the reduction that is
    pending. ``blocks``: of an InnerShard, else 1.
    """

    def __init__(self, placements: Sequence[Placements]) -> None:
        coded = [[_code(placement) for placement in each] for each in placements]
        array = np.array(coded, np.int64).reshape(len(placements), -1, 3)
        self.kind, self.dim, self.blocks = array[..., 0], array[..., 1], array[..., 2]

    def at(self, index: np.ndarray) -> Coded:
        """Of placements on one mesh dimension those that ``index`` [how many, mesh dimensions] picks."""
        picked = copy.copy(self)
        picked.kind, picked.dim = self.kind[index, 0], self.dim[index, 0]
        picked.blocks = self.blocks[index, 0]
        return picked

    def fits(self, shape: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Which shard a shape evenly on a mesh, those of one dimension in agreement."""
        good = np.ones(len(self.kind), bool)
        ranks = np.array(sizes)
        for dim in np.unique(self.dim[self.kind == SHARDED]):
            if dim >= len(shape):
                return good & False
            here = (self.kind == SHARDED) & (self.dim == dim)
            inner = here & (self.blocks > 1)
            plain = np.where(here & ~inner, ranks, 1).prod(axis=1)
            inside = np.where(inner, ranks, 1).prod(axis=1)
            blocks = np.where(inner, self.blocks, 1).max(axis=1)
            agree = np.where(inner, self.blocks, blocks[:, None]).min(axis=1) == blocks
            length = shape[dim]
            even = np.where(
                blocks > 1,
                (length % blocks == 0) & (blocks % plain == 0) & (length // blocks % inside == 0),
                length % plain == 0,
            )
            good &= ~here.any(axis=1) | (even & agree & (length > 0))
        kinds = np.where(self.kind == PENDING, self.dim, -1)
        mixed = np.where(self.kind == PENDING, self.dim, kinds.max(axis=1)[:, None]).min(axis=1)
        return good & (mixed == kinds.max(axis=1))


_REDUCTIONS = ("sum", "avg", "max", "min")


def _code(placement: Placement) -> tuple[int, int, int]:
    if isinstance(placement, Shard):
        return SHARDED, placement.dim, blocks_of(placement)
    if isinstance(placement, Partial):
        return PENDING, _REDUCTIONS.index(placement.reduce_op), 1
    return WHOLE, 0, 1
