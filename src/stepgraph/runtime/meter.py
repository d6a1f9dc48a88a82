"""What a step really takes on this rank: seconds, seconds of its collectives, bytes at its peak."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from stepgraph import torch_internals
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.program.collectives import is_collective, mesh_dim_of
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.runtime.live_memory import LiveMemory

Result = TypeVar("Result")
REPEATS = 10  # of a collective; the figure is their mean
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

    def timed(self, run: Callable[[], Result]) -> tuple[Result, float]:
        """Runs something, until the device has done it: its result and seconds."""
        self._wait()
        start = self.clock()
        found = run()
        self._wait()
        return found, self.clock() - start

    def watched(
        self, run: Callable[[], Result], held: Iterable[Any], lowering: str
    ) -> tuple[Result, int | None]:
        """Runs a step: its result, and the bytes of its tensors that are alive at once at its peak.

        Of an accelerator they are what its allocator counts, whose peak is reset; what else is on the
        device is taken off. On the host operations are counted that run one by one. None where nobody
        counts: compiled code on the host, and replayed graphs.

        Args:
            held: tensors that the step reads or writes, and that are there already.
        """
        how = LOWERINGS[lowering]
        if how.inner or (self._on_host and how.fuses):
            return run(), None
        held = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
        if self._on_host:
            with LiveMemory(held) as live:
                return run(), live.peak
        memory = torch.get_device_module(self.device)
        self._wait()
        own = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
        beside = memory.memory_allocated(self.device) - sum(own.values())
        memory.reset_peak_memory_stats(self.device)
        found = run()
        self._wait()
        return found, memory.max_memory_allocated(self.device) - beside

    def communication(
        self, programs: Mapping[Program, int], groups: Mapping[str, str]
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
        for program, times in programs.items():
            for node in filter(is_collective, program.operations()):
                value = meta(node.args[0])["val"]  # type: ignore[arg-type]
                group = groups[mesh_dim_of(node)]
                rest = tuple(map(_hashable, node.args[1:-1]))
                counts[node.target, tuple(value.shape), value.dtype, rest, group] += times
        if not counts:
            return None
        left = torch.ones(_WORK, _WORK, device=self.device)

        def usual(call: Callable[[], Any]) -> float:
            def work() -> Any:
                return torch.mm(left, left), torch.mm(left, left), call()

            work()
            return statistics.mean(self.timed(work)[1] for _ in range(REPEATS))

        total = 0.0
        with torch.no_grad():
            alone = usual(lambda: None)
            for (target, shape, dtype, rest, group), count in counts.items():
                given = torch.ones(shape, dtype=dtype, device=self.device)
                arguments = (given, *(list(a) if isinstance(a, tuple) else a for a in rest), group)
                took = usual(lambda: torch_internals.WAIT(target(*arguments)))  # noqa: B023
                total += max(took - alone, 0.0) * count
        return total

    def _wait(self) -> None:
        if not self._on_host:
            torch.accelerator.synchronize(self.device)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument
