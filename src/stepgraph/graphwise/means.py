"""Means over data-parallel ranks, with the word that each adds to see whether all do the same."""

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.program.layout import Spread, blocks_of

OWN_MICRO_BATCHES = (
    "micro_batches: loss and gradients are the mean over micro-batches (graph by graph)"
)


def mean_over_ranks(
    value: torch.Tensor, group: str, ranks: int, word: int | None
) -> tuple[torch.Tensor, bool]:
    """The mean of what each rank has, and whether all brought one word; gradients pass as they are."""
    return _Mean.apply(value, group, ranks, word)  # type: ignore[return-value]


def as_one_process(
    value: torch.Tensor, how: Spread | None, rows: int, group: str, ranks: int
) -> torch.Tensor:
    """What every rank has, as one process would: rows together, numbers averaged.

    Args:
        how: ranks have it; None: its shape says so.
        rows: of a rank's batch.
    """
    if ranks == 1:
        return value
    if isinstance(how, Partial) and how.reduce_op != "avg":  # of a graph that training has, too
        return torch_internals.sum_over_group(value, group, how.reduce_op)
    if isinstance(how, Partial) or (value.dim() == 0 and value.is_floating_point()):
        return mean_over_ranks(value, group, ranks, None)[0]
    if value.dim() == 0:
        return value
    if not isinstance(how, Placement):
        how = Shard(0) if rows and value.shape[0] % rows == 0 else Replicate()
    if not isinstance(how, Shard):
        return value
    blocks = value.unflatten(how.dim, (blocks_of(how), -1)).movedim(how.dim + 1, 0)
    whole = torch_internals.gather_over_group(blocks.contiguous(), ranks, group)
    return whole.movedim(0, how.dim + 1).flatten(how.dim, how.dim + 1)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: torch.Tensor, group: str, ranks: int, word: int | None):
        if ranks == 1:
            return value.clone(), True
        if word is None:
            return torch_internals.sum_over_group(value, group) / ranks, True
        both = torch.stack([value.double(), value.new_tensor(word, dtype=torch.float64)])
        total = torch_internals.sum_over_group(both, group)
        return (total[0] / ranks).to(value.dtype), total[1].item() == word * ranks

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, _: Any):
        return gradient, None, None, None
