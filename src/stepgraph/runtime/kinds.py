"""Which kinds of batch entry points have met: the same on every rank, and not too many."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepgraph.errors import ShapeLimitError
from stepgraph.runtime.batches import LocalBatch
from stepgraph.runtime.ranks import Ranks, agree_on_shapes, largest


@dataclass
class KindsOfBatch:
    """What each entry point has met so far, in an order that is every rank's.

    Attributes:
        limit: how many kinds programs are kept for.
        known: entry point -> keys of batches, numbered as they came.
    """

    ranks: Ranks
    limit: int
    known: dict[str, dict[tuple, int]] = field(default_factory=dict)

    def meet(self, entry: str, batch: LocalBatch) -> None:
        """Makes sure that all ranks bring a batch of the same kind; all of them call it at every call.

        As long as an entry point knows one kind nothing is exchanged, with several two numbers a call.

        Raises:
            BatchError: ranks have batches of different shapes.
            ShapeLimitError: a kind beyond those that programs are kept for.
        """
        known = self.known.setdefault(entry, {})
        number = known.get(batch.key, len(known))
        same = len(known) < 2 or largest(self.ranks, number, -number) == [number, -number]
        if same and number < len(known):
            return
        agree_on_shapes(batch.key, batch.shapes(), self.ranks)
        if number == len(known) == self.limit:
            raise ShapeLimitError(
                f"{self.limit + 1} different batch shapes, or constants in batches; "
                f"programs are kept for {self.limit}",
                why="so far: " + "; ".join(map(_show, known)),
                do="pad batches to a few lengths (stepgraph.pad_batches), pass numbers that change "
                "as tensors, or raise max_shapes",
            )
        known[batch.key] = number


def _show(key: tuple) -> str:
    """The shapes and constants of a batch."""
    leaves, paths, _ = key
    return ", ".join(
        f"{path}={leaf[2]!r}" if leaf[0] == "constant" else f"{path} {list(leaf[0])}"
        for path, leaf in zip(paths, leaves, strict=True)
    )
