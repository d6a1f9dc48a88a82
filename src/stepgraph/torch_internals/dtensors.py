"""What a DTensor holds."""

import torch
from torch.distributed.tensor import DTensor


def own_part(tensor: DTensor) -> torch.Tensor:
    """The very object that a DTensor holds, by which a replaced one is told."""
    return tensor._local_tensor


def replace(tensor: DTensor, other: DTensor) -> None:
    """Lets a DTensor be as another one, of another type or device; it stays the same object."""
    if other is not tensor:
        tensor.data = other
        replace_parts(tensor, other)


def replace_parts(tensor: DTensor, other: DTensor) -> None:
    """Lets a DTensor hold another one's parts and placements; it stays the same object."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec
