"""Names the calls of a model's entry points, of which every rank makes the same, for the watch."""

import zlib
from contextlib import AbstractContextManager

from stepgraph.runtime.batches import KindsOfBatch, LocalBatch
from stepgraph.runtime.watch import Watch


class Calls:
    """The calls of one model.

    Args:
        kinds: of batches, numbered alike on all ranks.
    """

    def __init__(self, watch: Watch, kinds: KindsOfBatch) -> None:
        self._watch, self._kinds, self._number = watch, kinds, watch.made
        self._known: dict[tuple[str, int], tuple[str, int]] = {}  # what it is, and its digest

    def one(self, name: str, batch: LocalBatch | None) -> AbstractContextManager:
        """One call of an entry point."""
        kind = 0 if batch is None else self._kinds.number(name, batch)
        if (name, kind) not in self._known:
            shown = name if batch is None else f"{name} on a batch of {batch.shapes()}"
            digest = zlib.crc32(repr((self._number, name, kind)).encode())
            if not kind and batch is not None:
                # Of any new shape: ranks will agree on one.
                return self._watch.call((shown, digest))
            self._known[name, kind] = shown, digest
        return self._watch.call(self._known[name, kind])
