"""How ranks have the batch's tensors and what graphs made, as far as it is known."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.program.layout import Spread


@dataclass
class _Found:
    how: Spread
    version: int
    is_read: bool = False


class Known:
    """Tensors, by identity, and how ranks have them; it keeps none of them alive.

    A sum that waits to be added up does so as it was made: once code writes into it, it is not known.
    """

    def __init__(self) -> None:
        self._found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._sums: list[_Found] = []

    def __getitem__(self, tensor: torch.Tensor) -> Spread | None:
        """None where it is not known; so for what is no tensor."""
        found = self._found.get(tensor) if isinstance(tensor, torch.Tensor) else None
        if found is None:
            return None
        found.is_read = True
        written = isinstance(found.how, Partial) and found.version != _version(tensor)
        return None if written else found.how

    def __setitem__(self, tensor: torch.Tensor, how: Spread) -> None:
        self._found[tensor] = _Found(how, _version(tensor))

    def update(self, pairs: Iterable[tuple[torch.Tensor, Spread]]) -> None:
        """Several at once."""
        for tensor, how in pairs:
            self[tensor] = how

    def made(self, tensor: torch.Tensor, how: Spread) -> None:
        """A graph made it."""
        self[tensor] = how
        if isinstance(how, Partial):
            self._sums.append(self._found[tensor])

    def forget(self, tensor: torch.Tensor) -> None:
        """It is not known any more."""
        self._found.pop(tensor, None)

    def sums_left(self, returned: Collection[torch.Tensor]) -> bool:
        """Whether graphs made sums since the last time that no graph read and that are not ``returned``."""
        for tensor in returned:
            self[tensor]
        left = any(not found.is_read for found in self._sums)
        self._sums.clear()
        return left


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
