"""What one rank did, call by call, as ranks compare it."""

import threading
import zlib
from collections import deque

KEPT = 256  # calls that a rank remembers


class Record:
    """Calls, and what ran in them: told by the main thread, and added up by whoever reads them.

    Attributes:
        tell: takes a call that begins (what it is, for messages; a digest, which tells calls apart that
            must not meet), or the digest of a program that runs, in that call or after it. A step waits
            for it, so it appends, and no more.
        number: of the last call.
        runs: what ran in and since the last call.
        calls: the number of a call -> what all up to it add up to, and what it is, for messages.
    """

    def __init__(self) -> None:
        self.number = self._chain = 0
        self.runs: list[int] = []
        self.calls: dict[int, tuple[int, str]] = {}
        self._told: deque[int | tuple[str, int]] = deque()
        self.tell = self._told.append
        self._adding = threading.Lock()

    def add_up(self) -> None:
        """All that was told so far counts."""
        with self._adding:
            self._add_up()

    def now(self) -> tuple[int, list[int], dict[int, tuple[int, str]]]:
        """The number of the last call, what ran in and since it, and the calls: of one moment."""
        with self._adding:
            self._add_up()
            return self.number, self.runs.copy(), self.calls.copy()

    def close(self) -> None:
        """Nobody adds up beside the main thread from here on; what is told counts all the same."""
        self.tell = self._tell_at_once

    def _tell_at_once(self, told: int | tuple[str, int]) -> None:
        self._told.append(told)
        self.add_up()

    def _add_up(self) -> None:
        while self._told:
            told = self._told.popleft()
            if isinstance(told, int):
                self.runs.append(told)
                continue
            shown, digest = told
            self._chain = zlib.crc32(repr((self._chain, digest, self.runs)).encode())
            self.number += 1
            self.calls[self.number] = (self._chain, shown)
            self.calls.pop(self.number - KEPT, None)
            self.runs = []
