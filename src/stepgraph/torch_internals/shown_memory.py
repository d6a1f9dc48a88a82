"""Whether tensors show the memory that they showed, whatever was written to it.

Assigning to ``.data`` lets a tensor show another storage. Where torch has, in the tensor's object, the
address of what it is in C++, and there that of the storage, those words are compared, of all tensors in two
gathers; where it has them elsewhere, the storages.
"""

import operator
import sys
from collections.abc import Sequence

import torch

from stepgraph.torch_internals.words import Reader, Snapshot, Together, word


class ShownMemory:
    """The storages that tensors show now; they are kept alive, so that no other gets the address of one.

    Attributes:
        storages: of each tensor.
        snapshot: words that tell; None: torch has them elsewhere.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self.storages = [tensor.untyped_storage() for tensor in tensors]
        self.snapshot = self._words()
        self._together = None if self.snapshot is None else Together([self.snapshot])

    def same(self) -> bool:
        """Whether they still do; takes microseconds."""
        if self._together is not None:
            return self._together.same()
        now = map(torch.Tensor.untyped_storage, self._tensors)
        return all(map(operator.is_, now, self.storages))

    def _words(self) -> Snapshot | None:
        implementations = [tensor._cdata for tensor in self._tensors]
        rows = zip(self._tensors, implementations, self.storages, strict=True)
        if not _PLACES or not all(_is_there(*row) for row in rows):
            return None
        objects, storages = _PLACES
        addresses = [id(tensor) + objects for tensor in self._tensors]
        # Only while a tensor is what it was, that is alive, and may be looked into.
        behind = [one + storages for one in implementations]
        words, words_behind = (bytes(Reader(places)()) for places in (addresses, behind))
        return Snapshot(addresses, words, behind, words_behind, [self._tensors, self.storages])


def _is_there(tensor: torch.Tensor, implementation: int, storage: torch.UntypedStorage) -> bool:
    objects, storages = _PLACES
    return (
        word(id(tensor) + objects) == implementation
        and word(implementation + storages) == storage._cdata
    )


def _places() -> tuple[int, ...]:
    """Bytes into a tensor's object, and into what it is in C++; none where they are not found."""
    if sys.implementation.name != "cpython" or sys.maxsize < 2**32:
        return ()
    tensor = torch.empty(1)
    own, storage = tensor._cdata, tensor.untyped_storage()._cdata
    objects = [i for i in range(0, torch.Tensor.__basicsize__, 8) if word(id(tensor) + i) == own]
    storages = [i for i in range(0, 48, 8) if word(own + i) == storage]
    return (objects[0], storages[0]) if len(objects) == len(storages) == 1 else ()


_PLACES = _places()
