"""What callers get of what ranks made of their rows: that of the global batch, where it can be had.

Losses and results come from graphs with how ranks have them (:mod:`stepgraph.analysis.sums`); what code
between graphs made is each rank's own, and is said to be.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.analysis.sums import OWN_LOSS, OWN_RESULT
from stepgraph.graphwise.known import Known
from stepgraph.graphwise.means import mean_over_ranks
from stepgraph.program.layout import Apart, blocks_of

OUTSIDE = "it is made outside every graph"


class OfAllRanks:
    """Puts together what data-parallel ranks have.

    Args:
        ranks, group: how many, and their process group.
        known: how they have what graphs made.
        report: takes notes, each said once.
    """

    def __init__(
        self, ranks: int, group: str, known: Known, report: Callable[[list[str]], None]
    ) -> None:
        self._ranks, self._group = ranks, group
        self._known, self._report = known, report
        self._said = False

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

    def result(self, value: Any, rows: int) -> Any:
        """What ranks returned in an evaluation, as one process would have it: rows together, sums added up.

        Numbers that are each rank's own become their mean, and are said to be.

        Args:
            rows: of this rank's batch.
        """
        if not isinstance(value, torch.Tensor) or self._ranks == 1:
            return value
        how = self._known[value]
        if isinstance(how, Partial):
            return self.total(value)
        of_rows = value.dim() > 0 and rows and value.shape[0] % rows == 0
        if how is None and not of_rows:
            self._report([f"{OWN_RESULT}, because {OUTSIDE}"])
        if value.dim() == 0:
            return self._mean(value) if value.is_floating_point() else value
        if not isinstance(how, Placement):  # its shape says so
            how = Shard(0) if of_rows else Replicate()
        if not isinstance(how, Shard):
            return value
        blocks = value.unflatten(how.dim, (blocks_of(how), -1)).movedim(how.dim + 1, 0)
        whole = torch_internals.gather_over_group(blocks.contiguous(), self._ranks, self._group)
        return whole.movedim(0, how.dim + 1).flatten(how.dim, how.dim + 1)

    def total(self, value: Any) -> Any:
        """A sum, mean or maximum over rows that waits to be added up, added up; anything else as it is."""
        how = self._known[value]
        if self._ranks == 1 or not isinstance(how, Partial):
            return value
        if how.reduce_op == "avg":
            return self._mean(value)
        return torch_internals.sum_over_group(value, self._group, how.reduce_op)

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        return mean_over_ranks(value, self._group, self._ranks, None)[0]
