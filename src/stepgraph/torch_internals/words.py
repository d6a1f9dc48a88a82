"""Single words of this process's memory, many in one gather: memory is waited for once."""

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def word(address: int) -> int:
    """Eight bytes of an object that is alive."""
    return ctypes.c_uint64.from_address(address).value


def reader(addresses: Sequence[int]) -> Callable[[], Any]:
    """Reads words of objects that are alive, as an array.

    Args:
        addresses: multiples of eight apart.
    """
    if not addresses:
        return lambda: np.empty(0, np.uint64)
    where = np.array(addresses, dtype=np.int64)
    start, words = int(where.min()), int(where.max() - where.min()) // 8 + 1
    memory = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(start))
    return functools.partial(memory.take, (where - start) // 8)


@dataclass(frozen=True)
class Snapshot:
    """Words as they were when something held.

    Attributes:
        addresses: where they are.
        words: what they were.
        behind, words_behind: the same of what those words lead to, and only while they are the same.
        alive: what they are of, and what they are the addresses of.
    """

    addresses: list[int] = field(default_factory=list)
    words: bytes = b""
    behind: list[int] = field(default_factory=list)
    words_behind: bytes = b""
    alive: list[Any] = field(default_factory=list)


class Together:
    """Several snapshots, compared at once."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        chained = itertools.chain.from_iterable
        self._alive = [one.alive for one in snapshots]
        self._read = reader([*chained(one.addresses for one in snapshots)])
        self._words = b"".join(one.words for one in snapshots)
        self._read_behind = reader([*chained(one.behind for one in snapshots)])
        self._words_behind = b"".join(one.words_behind for one in snapshots)

    def same(self) -> bool:
        """Whether all words are what they were; takes microseconds."""
        return (
            self._read().tobytes() == self._words
            and self._read_behind().tobytes() == self._words_behind
        )
