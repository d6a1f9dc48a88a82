"""Counts the bytes of tensors that are alive while something runs, on any device.

For where no allocator keeps count. What is offloaded is counted apart, also where the device is the host.
Memory that a kernel takes and returns inside itself is not seen (an optimizer's update is looked into), nor
what compiled code allocates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepgraph.operators.updates import UPDATE
from stepgraph.program.copies import TO_HOST
from stepgraph.torch_internals import TorchDispatchMode, pytree
from stepgraph.torch_internals.recording import kernel_call


class LiveMemory(TorchDispatchMode):
    """``peak``: the most bytes of distinct tensor storages alive behind any operation so far.

    ``peak_on_host``: the same of what was offloaded, which is in no other number.

    Args:
        held: tensors that are alive already. What is neither one of them nor made inside is not counted.
        beside: tensors that are alive all along and are not counted, nor what shares memory with them.
        away: tensors that were offloaded already.

    Use it as a context; it slows every operation down.
    """

    def __init__(
        self,
        held: Iterable[torch.Tensor] = (),
        beside: Iterable[torch.Tensor] = (),
        away: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._beside = {StorageWeakRef(one.untyped_storage()).cdata for one in beside}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._on_host: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.peak_on_host = 0
        self._take(held)
        self._take(away, offloaded=True)

    @property
    def now(self) -> int:
        """Bytes alive now."""
        return self._bytes_of(self._alive)

    @staticmethod
    def _bytes_of(table: dict[int, tuple[StorageWeakRef, int]]) -> int:
        gone = [key for key, (storage, _) in table.items() if storage.expired()]
        for key in gone:
            del table[key]
        return sum(size for _, size in table.values())

    def _take(self, tensors: Iterable[Any], offloaded: bool = False) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata in self._beside:
                    continue
                tables = (self._alive, self._on_host)
                known = [table[reference.cdata] for table in tables if reference.cdata in table]
                if all(held.expired() for held, _ in known):
                    table = self._on_host if offloaded else self._alive
                    table[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.now)
        self.peak_on_host = max(self.peak_on_host, self._bytes_of(self._on_host))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs the operation and counts what it made."""
        if func is UPDATE:  # it holds more than it returns, and so it is predicted
            with self:
                return kernel_call(func, args[0][0].device, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self._take(pytree.tree_leaves(result), offloaded=func is TO_HOST)
        return result
