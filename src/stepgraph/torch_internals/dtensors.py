"""What a DTensor holds."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def made_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: torch.Tensor
) -> DTensor:
    """A DTensor that views a part wherever that is; ``from_local`` copies it to the mesh's device.

    Args:
        whole: of its shape and strides.
    """
    form = TensorMeta(whole.shape, whole.stride(), local.dtype)
    return DTensor(
        local, DTensorSpec(mesh, tuple(placements), tensor_meta=form), requires_grad=False
    )


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
