"""Counts the bytes of tensors that are alive while something runs, on any device.

What predictions of memory are compared with where there is no allocator that keeps count. Memory that a
kernel takes and returns inside itself is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepgraph.torch_internals import TorchDispatchMode, pytree


class LiveMemory(TorchDispatchMode):
    """``peak``: the most bytes of distinct tensor storages alive behind any operation so far.

    Args:
        held: tensors that are alive already. What is neither one of them nor made inside is not counted.

    Use it as a context; it slows every operation down.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._take(held)

    @property
    def now(self) -> int:
        """Bytes alive now."""
        gone = [key for key, (storage, _) in self._alive.items() if storage.expired()]
        for key in gone:
            del self._alive[key]
        return sum(size for _, size in self._alive.values())

    def _take(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                known = self._alive.get(reference.cdata)
                if known is None or known[0].expired():
                    self._alive[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs the operation and counts what it made."""
        result = func(*args, **(kwargs or {}))
        self._take(pytree.tree_leaves(result))
        return result
