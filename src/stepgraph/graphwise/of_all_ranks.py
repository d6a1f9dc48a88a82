"""What callers get of what ranks made of their rows: that of the global batch, where it can be had.

Losses and results come from graphs with how ranks have them (:mod:`stepgraph.analysis.sums`); what code
between graphs made is each rank's own, and is said to be.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.analysis.sums import OWN_LOSS, OWN_RESULT
from stepgraph.graphwise.known import Known
from stepgraph.graphwise.means import mean_over_ranks
from stepgraph.program.layout import Apart, Spread, blocks_of

OUTSIDE = "it is made outside every graph"
SHAPES = "ranks have it in other shapes"


class OfAllRanks:
    """Puts together what data-parallel ranks have.

    Args:
        ranks, group, device: how many, their process group, and where they exchange tensors.
        known: how they have what graphs made.
        report: takes notes, each said once.

    Attributes:
        rows: of this rank's batch now.
    """

    def __init__(
        self,
        ranks: int,
        group: str,
        device: torch.device,
        known: Known,
        report: Callable[[list[str]], None],
    ) -> None:
        self._ranks, self._group, self._device = ranks, group, device
        self._known, self._report = known, report
        self._said, self.rows = False, 0

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What has the loss of the global batch as its mean over ranks. One that is own is said to be."""
        how = self._known[loss]
        if self._ranks == 1 or how in (Replicate(), Partial("avg")):
            return loss
        if how == Partial("sum"):
            return loss * self._ranks
        if not self._said:
            self._said = True
            reason = how.reason if isinstance(how, Apart) else OUTSIDE
            self._report([f"{OWN_LOSS}, because {reason}"])
        return loss

    def results(self, values: Sequence[Any], gathers: bool) -> list[Any]:
        """What ranks returned in an evaluation, as one process would have it: rows together, sums added up.

        Floating-point numbers that are each rank's own become their mean, and are said to be.

        Args:
            values: as many, of the same types and dimensions, on every rank.
            gathers: False: rows stay each rank's own.
        """
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        hows = iter(self._agreed(tensors))
        return [
            self._result(value, *next(hows), gathers) if isinstance(value, torch.Tensor) else value
            for value in values
        ]

    def _agreed(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Spread | None, bool]]:
        """How ranks have tensors, where they agree; and whether they are of one shape on all ranks."""
        if not tensors:
            return []
        hows = [self._known[tensor] for tensor in tensors]
        words = [str(how) if isinstance(how, Placement) else "own" for how in hows]
        mine = [*words, *(str(tuple(tensor.shape)) for tensor in tensors)]
        codes = [zlib.crc32(word.encode()) for word in mine]
        both = torch.tensor([*codes, *(-code for code in codes)], device=self._device)
        most = torch_internals.sum_over_group(both, self._group, "max").view(2, -1)
        same = (most[0] == -most[1]).view(2, -1).t().tolist()
        return [(how if one else None, shape) for how, (one, shape) in zip(hows, same, strict=True)]

    def _result(
        self, value: torch.Tensor, how: Spread | None, of_one_shape: bool, gathers: bool
    ) -> torch.Tensor:
        if isinstance(how, Partial) and of_one_shape:
            return self._total(value, how)
        by_shape = self.is_rows_by_shape(value)
        if how is None and not by_shape or not of_one_shape:
            self._report([f"{OWN_RESULT}, because {OUTSIDE if of_one_shape else SHAPES}"])
        if not of_one_shape:
            return value
        if not isinstance(how, Placement) and value.dim():
            how = Shard(0) if by_shape else None
        if isinstance(how, Replicate):
            return value
        if isinstance(how, Shard):
            return self._gathered(value, how) if gathers else value
        return self._mean(value) if value.is_floating_point() else value

    def is_rows_by_shape(self, value: Any) -> bool:
        """Whether nothing is known of a value, but that there are as many of it as rows."""
        if not isinstance(value, torch.Tensor) or not value.dim() or not self.rows:
            return False
        known = isinstance(self._known[value], Placement)
        return not known and value.shape[0] > 0 and value.shape[0] % self.rows == 0

    def _gathered(self, value: torch.Tensor, how: Shard) -> torch.Tensor:
        blocks = value.unflatten(how.dim, (blocks_of(how), -1)).movedim(how.dim + 1, 0)
        whole = torch_internals.gather_over_group(blocks.contiguous(), self._ranks, self._group)
        return whole.movedim(0, how.dim + 1).flatten(how.dim, how.dim + 1)

    def _total(self, value: torch.Tensor, how: Partial) -> torch.Tensor:
        """A sum, mean or maximum over rows that waits to be added up, added up."""
        if how.reduce_op == "avg":
            return self._mean(value)
        return torch_internals.sum_over_group(value, self._group, how.reduce_op)

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        return mean_over_ranks(value, self._group, self._ranks, None)[0]
