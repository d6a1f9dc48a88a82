"""Single words of this process's memory, many in one gather: memory is waited for once."""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def word(address: int) -> int:
    """Eight bytes of an object that is alive."""
    return ctypes.c_uint64.from_address(address).value


class Reader:
    """Reads words of objects that are alive, into the same memory each time.

    Args:
        addresses: multiples of eight apart.
    """

    __slots__ = ("_gather", "_now")

    def __init__(self, addresses: Sequence[int]) -> None:
        self._now = bytearray(8 * len(addresses))
        self._gather: Callable[[], Any] = lambda: None
        if addresses:
            where = np.array(addresses, dtype=np.int64)
            start, words = int(where.min()), int(where.max() - where.min()) // 8 + 1
            memory = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(start))
            # What is clipped is not written somewhere else first.
            now = np.frombuffer(self._now, np.uint64)
            self._gather = functools.partial(memory.take, (where - start) // 8, None, now, "clip")

    def __call__(self) -> bytearray:
        """What they are now; until the next time."""
        self._gather()
        return self._now


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
    """Several snapshots, compared at once; a word that is in more than one is read once."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._alive = [one.alive for one in snapshots]
        self._read, self._words = _once((one.addresses, one.words) for one in snapshots)
        behind = ((one.behind, one.words_behind) for one in snapshots)
        self._read_behind, self._words_behind = _once(behind)

    def same(self) -> bool:
        """Whether all words are what they were; takes microseconds."""
        return self._read() == self._words and self._read_behind() == self._words_behind


def _once(several: Iterable[tuple[list[int], bytes]]) -> tuple[Reader, bytes]:
    """What reads all words, in the order of their addresses, and what they were."""
    words = {
        pair
        for where, were in several
        for pair in zip(where, np.frombuffer(were, np.uint64).tolist(), strict=True)
    }
    addresses, were = zip(*sorted(words), strict=True) if words else ((), ())
    return Reader(addresses), np.array(were, np.uint64).tobytes()
