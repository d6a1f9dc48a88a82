"""Numbers that are written where a mask says so: ``x[mask] = 0`` is a choice for each element.

As ``index_put`` it looks like a write to places that the data decides, and ranks would gather for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _chosen(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    masks = [index for index in indices if index is not None]
    is_mask = len(indices) == 1 and len(masks) == 1 and masks[0].dtype == torch.bool
    if not is_mask or accumulate or values.numel() != 1:
        return NotImplemented
    (mask,) = masks
    if mask.shape != x.shape[: mask.dim()]:
        return NotImplemented
    for _ in range(x.dim() - mask.dim()):
        mask = mask.unsqueeze(-1)
    number = values.reshape(()) if values.dim() else values
    return torch.where(mask, number.to(x.dtype), x)


MASKED_WRITES = {aten.index_put.default: _chosen}
