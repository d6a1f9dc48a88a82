"""What runs without autograd: nothing is recorded, and nobody is asked whether it should be."""

import functools
from collections.abc import Callable
from typing import Any

import torch

# Of operators: torch's own, and its collectives.
TORCHS_NAMESPACES = ("aten", "prims", "_c10d_functional")


def below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose operators go straight to their kernels.

    ``no_grad`` alone still asks autograd at every operator; torch's collectives answer in Python.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return function(*args)

    return call


def kernel_call(operator: Any, device: torch.device, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator's kernel alone: of one in Python, an active dispatch mode sees what it calls."""
    key = torch._C._dispatch_key_parse(torch._C._dispatch_key_for_device(device.type))
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
