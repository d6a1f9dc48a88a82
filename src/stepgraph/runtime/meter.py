"""What a step really takes on this rank: seconds, seconds of its collectives, bytes at its peak."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from stepgraph import torch_internals
from stepgraph.cost.work import size_in_bytes
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.program.collectives import is_collective, mesh_dim_of
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.runtime.live_memory import LiveMemory

Result = TypeVar("Result")
# Of a collective, and how many of the fastest, and of the slowest, do not count in the mean of them: it
# takes now this long, now that long, and a step has some of each.
REPEATS, ODD = 12, 3
_WORK = 384  # rows of the products between two collectives


class Meter:
    """Measures on one rank.

    Args:
        device: that computes.
        clock: seconds.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.clock = device, clock
        self._on_host = device.type == torch_internals.host_device().type

    @property
    def sees_all(self) -> bool:
        """Whether no bytes of a step are hidden from it: on the host, those inside a kernel are."""
        return not self._on_host

    def timed(self, run: Callable[[], Result]) -> tuple[Result, float]:
        """Runs something, until the device has done it: its result and seconds."""
        self._wait()
        start = self.clock()
        found = run()
        self._wait()
        return found, self.clock() - start

    def watched(
        self,
        run: Callable[[], Result],
        held: Iterable[torch.Tensor],
        batch: Iterable[Any],
        lowering: str,
    ) -> tuple[Result, int | None]:
        """Runs a step: its result, and the bytes of its tensors that are alive at once at its peak.

        Of an accelerator they are what its allocator counts, whose peak is reset; what else is on the
        device is taken off. On the host operations are counted that run one by one. None where nobody
        counts: compiled code on the host, and replayed graphs.

        Args:
            held: tensors that outlive the step.
            batch: what it is called with; of a part of a larger tensor, the part counts.
        """
        how = LOWERINGS[lowering]
        if how.inner or (self._on_host and how.fuses):
            return run(), None
        given = [leaf for leaf in batch if isinstance(leaf, torch.Tensor)]
        brought = size_in_bytes(given)
        if self._on_host:
            with LiveMemory(held, beside=given) as live:
                return run(), live.peak + brought
        memory = torch.get_device_module(self.device)
        self._wait()
        own = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
        beside = memory.memory_allocated(self.device) - sum(own.values()) - brought
        memory.reset_peak_memory_stats(self.device)
        found = run()
        self._wait()
        return found, memory.max_memory_allocated(self.device) - beside

    def communication(
        self, programs: Iterable[tuple[Program, int]], groups: Mapping[str, str]
    ) -> float | None:
        """Seconds of the collectives of programs, each timed by itself; called by all ranks.

        As they stand in a step, with computation in between: back to back they take a fraction of it, for
        no rank waits for another one. What a rank has to wait for the others in a step is not in it.

        Args:
            programs: bound, and how often each runs.
            groups: names of mesh dimensions -> names of this rank's process groups.

        Returns:
            seconds on this rank; None where there are no collectives.
        """
        counts: Counter[tuple] = Counter()
        for program, times in programs:
            for node in filter(is_collective, program.operations()):
                value = meta(node.args[0])["val"]  # type: ignore[arg-type]
                group = groups[mesh_dim_of(node)]
                rest = tuple(map(_hashable, node.args[1:-1]))
                counts[node.target, tuple(value.shape), value.dtype, rest, group] += times
        if not counts:
            return None
        left = torch.ones(_WORK, _WORK, device=self.device)

        def usual(call: Callable[[], Any]) -> float:
            times = []
            for _ in range(REPEATS):
                torch.mm(torch.mm(left, left), left)
                times.append(self.timed(call)[1])
            return statistics.mean(sorted(times)[ODD:-ODD])

        total = 0.0
        with torch.no_grad():
            for (target, shape, dtype, rest, group), count in counts.items():
                given = torch.ones(shape, dtype=dtype, device=self.device)
                arguments = (given, *(list(a) if isinstance(a, tuple) else a for a in rest), group)
                took = usual(lambda: torch_internals.WAIT(target(*arguments)))  # noqa: B023
                total += took * count
        return total

    def _wait(self) -> None:
        if not self._on_host:
            torch.accelerator.synchronize(self.device)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument
