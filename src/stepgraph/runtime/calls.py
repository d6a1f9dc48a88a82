"""Names the calls of a model's entry points, of which every rank makes the same, for the watch."""

import contextlib
import zlib
from contextlib import AbstractContextManager

from stepgraph.runtime.batches import KindsOfBatch, LocalBatch
from stepgraph.runtime.watch import Watch


class Calls:
    """The calls of one model.

    Args:
        kinds: of batches, numbered alike on all ranks.
    """

    # Few objects: at a step none of them is in a cache.
    __slots__ = ("_kinds", "_known", "_number", "_record", "_within")

    def __init__(self, watch: Watch, kinds: KindsOfBatch) -> None:
        self._within, self._record = watch.within, watch.record
        self._kinds, self._number = kinds, watch.made
        # By whether a batch is of the one kind there is: what a call is, for messages, and its digest.
        self._known: tuple[dict[str, tuple[str, int]], ...] = {}, {}

    def one(self, name: str, batch: LocalBatch | None = None) -> AbstractContextManager:
        """One call of an entry point."""
        if not self._within.depth:
            kind = 0 if batch is None else self._kinds.number(name, batch)
            self._record.tell(self._known[kind].get(name) or self._new(kind, name, batch))
        return self._within

    def _new(self, kind: int, name: str, batch: LocalBatch | None) -> tuple[str, int]:
        shown = name if batch is None else f"{name} on a batch of {batch.shapes()}"
        one = shown, zlib.crc32(repr((self._number, name, kind)).encode())
        if kind or batch is None:  # else of any new shape: ranks will agree on one
            self._known[kind][name] = one
        return one


def alone(name: str, batch: LocalBatch | None = None) -> AbstractContextManager:
    """One call of an entry point, where there is no other rank."""
    return contextlib.nullcontext()
