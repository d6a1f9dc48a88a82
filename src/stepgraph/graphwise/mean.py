"""The mean over ranks of a value that each has, and whether they did the same to come to it."""

from typing import Any

import torch

from stepgraph import torch_internals


class Mean(torch.autograd.Function):
    """Of a 0-dim value; gradients pass as they are. Also whether all ranks brought the same ``word``."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, group: str, ranks: int, word: int | None):  # noqa: D102
        if ranks == 1:
            return value.clone(), True
        if word is None:
            return torch_internals.sum_over_group(value, group) / ranks, True
        both = torch.stack([value.double(), value.new_tensor(word, dtype=torch.float64)])
        total = torch_internals.sum_over_group(both, group)
        return (total[0] / ranks).to(value.dtype), total[1].item() == word * ranks

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, _: Any):  # noqa: D102
        return gradient, None, None, None
