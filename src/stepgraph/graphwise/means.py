"""Means over data-parallel ranks, with the word that each adds to see whether all do the same."""

from typing import Any

import torch

from stepgraph import torch_internals

OWN_MICRO_BATCHES = (
    "micro_batches: loss and gradients are the mean over micro-batches (graph by graph)"
)


def mean_over_ranks(
    value: torch.Tensor, group: str, ranks: int, word: int | None
) -> tuple[torch.Tensor, bool]:
    """The mean of what each rank has, and whether all brought one word; gradients pass as they are."""
    return _Mean.apply(value, group, ranks, word)  # type: ignore[return-value]


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
