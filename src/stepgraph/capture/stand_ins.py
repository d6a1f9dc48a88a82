"""What a model, and code around it, hold while they are captured: fake tensors of global shape.

So capture never sees shards, DTensors or any other device, and computes nothing: they are on the host.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph import torch_internals
from stepgraph.capture.outside_tensors import OutsideTensor


@contextlib.contextmanager
def lent_stand_ins(
    model: nn.Module,
    outside: Sequence[OutsideTensor],
    inputs: Sequence[torch.Tensor],
    compute_dtype: torch.dtype | None,
) -> Iterator[None]:
    """Lends fake parameters and buffers, and puts back the real ones; so of tensors from elsewhere.

    Args:
        inputs: fake tensors, whose mode is used.
        compute_dtype: of floating-point parameters; None: as they are.
    """
    device = torch_internals.host_device()
    mode = torch_internals.fake_mode_of(inputs) or torch_internals.new_fake_mode()
    replaced: list[tuple[Any, Any, Any]] = []
    stand_ins: dict[int, torch.Tensor] = {}

    def replace(table: Any, key: Any, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = _stand_in(tensor, mode, device, dtype)
        replaced.append((table, key, tensor))
        table[key] = stand_ins[id(tensor)]

    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        replace(table, name, tensor, compute_dtype)
        for one in outside:
            plain = one.found.device == device and not isinstance(one.found, DTensor)
            if plain or isinstance(one.table, tuple):
                continue  # dynamo takes it for what it is
            replace(one.table, one.key, one.found, None)
        for module in model.modules():  # recurrent networks keep their weights in a list as well
            for name, held in list(vars(module).items()):
                if isinstance(held, list) and any(id(x) in stand_ins for x in held):
                    replaced.append((vars(module), name, held))
                    vars(module)[name] = [stand_ins.get(id(x), x) for x in held]
        yield
    finally:
        for table, key, tensor in reversed(replaced):
            table[key] = tensor


def _stand_in(
    tensor: torch.Tensor, mode: Any, device: torch.device, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    dtype = tensor.dtype
    if isinstance(tensor, nn.Parameter) and dtype.is_floating_point:
        dtype = compute_dtype or dtype
    with mode:
        fake = torch.empty_strided(
            tuple(tensor.shape), tuple(tensor.stride()), dtype=dtype, device=device
        )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
