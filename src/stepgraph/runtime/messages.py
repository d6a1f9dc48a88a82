"""Short messages between ranks that need no collective, so that a thread may wait for them.

A save that goes on while the next step runs must not touch a process group: its collectives would
come between those of the step, in another order on every rank. The store by which the ranks found
each other has none of that.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from stepgraph import torch_internals
from stepgraph.runtime.ranks import Ranks

LIMIT_SECONDS = 30 * 60.0  # as long as gloo waits for a rank
_POLL_SECONDS = 0.002


class Messages:
    """One conversation of all ranks.

    Args:
        token: sets it apart from others; the same on every rank.
    """

    def __init__(self, ranks: Ranks, token: str) -> None:
        self.rank, self.size = ranks.rank, ranks.shape.world_size
        self._prefix = f"stepgraph/{token}"
        if self.size > 1:
            self._store = torch_internals.rendezvous_store()

    def gather(self, topic: str, value: Any) -> list[Any] | None:
        """Every rank's value in order, on the first rank; None elsewhere."""
        if self.size == 1:
            return [value]
        if self.rank:
            self._store.set(f"{self._prefix}/{topic}/{self.rank}", _pack(value))
            return None
        return [value] + [self._take(f"{topic}/{rank}") for rank in range(1, self.size)]

    def tell(self, topic: str, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        if self.rank == 0:
            for rank in range(1, self.size):
                self._store.set(f"{self._prefix}/{topic}/{rank}", _pack(value))
            return value
        return self._take(f"{topic}/{self.rank}")

    def _take(self, topic: str) -> Any:
        """Waits for a message and removes it. Waiting inside the store would lock it for others."""
        key = f"{self._prefix}/{topic}"
        stop = time.monotonic() + LIMIT_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > stop:
                raise TimeoutError(f"no message {topic!r} after {LIMIT_SECONDS:.0f} seconds")
            time.sleep(_POLL_SECONDS)
        packed = self._store.get(key)
        self._store.delete_key(key)
        return pickle.loads(bytes.fromhex(packed.decode()))


def _pack(value: Any) -> str:
    """As text: a store's values are strings."""
    return pickle.dumps(value).hex()
