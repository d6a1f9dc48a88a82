"""Times calls so that the figure holds in a step.

A figure is the median of many short repetitions: a step is made of usual calls, not of the fastest.
Operands take turns and results are kept for a while, so that what a call touches is about as far away as it
is in a step, where other operations have run in between.
"""

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

SECONDS = 0.06  # for one figure
_FOOTPRINT = 32 * 2**20  # bytes of operands that take turns, as a small step has


class Timer:
    """Times calls on one device."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.waits = where.type != torch.Generator().device.type
        self._kept: deque[Any] = deque(maxlen=1)

    def operands(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Tensors that a measured call may be given in turn: as much of them as a small step has."""
        size = torch.Size(shape).numel() * dtype.itemsize
        sets = min(max(_FOOTPRINT // size, 3), 64)
        return [torch.randn(shape, device=self.where).to(dtype) for _ in range(sets)]

    def usual(
        self, call: Callable[..., Any], *operands: Sequence[Any], seconds: float = SECONDS
    ) -> float:
        """Seconds of one call: the median of batches of calls that take a millisecond."""
        turns = zip(*map(itertools.cycle, operands), strict=False)
        self._kept = deque(maxlen=len(operands[0]))
        self._batch(call, turns, len(operands[0]) + 2)  # until memory of those before is used again
        calls = max(1, int(1e-3 / max(self._batch(call, turns, 1), 1e-7)))
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 4:
            times.append(self._batch(call, turns, calls))
        self._kept.clear()
        return statistics.median(times)

    def once(self, call: Callable[[], Any]) -> float:
        """Seconds of one call."""
        self._kept.clear()
        return self._batch(call, itertools.repeat(()), 1)

    def in_turns(self, works: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, float]:
        """Seconds of several pieces of work, which are compared; those of ranks in the same order.

        A step adds up slow ones and fast ones, so a figure is a mean, but of the slowest, which other
        processes stopped. Pieces take turns, in a random order: what the machine does meanwhile befalls all
        of them, as placements are chosen by how much more one takes than another.
        """
        taken: dict[Key, list[float]] = {key: [] for key in works}
        keys, order = [*works], random.Random(0)  # the same on all ranks
        for _ in range(repeats):
            for key in order.sample(keys, len(keys)):
                taken[key].append(self.once(works[key]))
        fastest = repeats - repeats // 10
        return {key: statistics.mean(sorted(each)[:fastest]) for key, each in taken.items()}

    def _batch(self, call: Callable[..., Any], turns: Any, calls: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            self._kept.append(call(*next(turns)))
        self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.waits:
            torch.accelerator.synchronize()
