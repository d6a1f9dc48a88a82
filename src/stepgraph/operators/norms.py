"""Norms of many tensors as one operator."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("stepgraph::sum_of_squares", mutates_args=())
def sum_of_squares(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The squares of all elements of all tensors, summed.

    Args:
        tensors: real, of any shapes.
        dtype: in which it is computed, and of the result.
    """
    norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    return torch.stack(norms).square_().sum()


@sum_of_squares.register_fake
def _(tensors, dtype):
    return tensors[0].new_empty((), dtype=dtype)


SUM_OF_SQUARES = torch.ops.stepgraph.sum_of_squares.default
