"""What captures and replays: a thin layer over torch's CUDA graphs, which tests replace by a recorder."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from stepgraph.program.copies import keeping_host_memory

Result = TypeVar("Result")


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Runs it again, on the memory that it was captured with."""
        ...

    def release(self) -> None:
        """Lets go of it, and of the collectives that it holds."""
        ...


class Graphs(Protocol):
    """Captures on one stream into one pool, for one thread."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """Runs something where it will be captured, so that nothing is made for the first time there."""
        ...

    def capture(self, run: Callable[[], Result], generators: Sequence[Any]) -> tuple[Graph, Result]:
        """Captures what something launches; its results have no values before the first replay.

        Args:
            generators: what it draws from: each is seeded before a replay.
        """
        ...

    def generator(self) -> Any:
        """A new generator of the device."""
        ...


class CudaGraphs:
    """Those of torch, on the device that is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """On the stream that captures, between what was launched before and what will be."""
        now = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            found = run()
        now.wait_stream(self.stream)
        return found

    def capture(self, run: Callable[[], Result], generators: Sequence[Any]) -> tuple[Graph, Result]:
        """Other threads (a watchdog of collectives, one that pins memory) may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        how = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with keeping_host_memory() as host, torch.cuda.graph(graph, **how):
                found = run()
        except BaseException:
            # torch leaves generators and the pool as if it went on: nothing could draw, or capture.
            self.pool = torch.cuda.graph_pool_handle()
            index = self.stream.device_index
            for generator in (torch.cuda.default_generators[index], *generators):
                generator.graphsafe_set_state(generator.clone_state())
            raise
        return CudaGraph(graph, host), found

    def generator(self) -> torch.Generator:
        """A new generator of the device."""
        return torch.Generator(self.device)


class CudaGraph:
    """One of torch's; ``host``: pinned memory that it copies to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, host: Sequence[torch.Tensor] = ()) -> None:
        self.graph, self.host = graph, host

    def replay(self) -> None:
        """On the current stream."""
        self.graph.replay()

    def release(self) -> None:
        """After what is running."""
        torch.cuda.synchronize()
        self.graph.reset()
        self.host = ()


make_graphs: Callable[[torch.device], Graphs] = CudaGraphs


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.made: dict[torch.device, Graphs] = {}


_of_thread = _OfThread()


def graphs_of(device: torch.device) -> Graphs:
    """What this thread captures with: one stream and one pool for all that it captures on a device."""
    if device not in _of_thread.made:
        _of_thread.made[device] = make_graphs(device)
    return _of_thread.made[device]


def forget_graphs() -> None:
    """Of this thread: whoever captures next starts with a new pool."""
    _of_thread.made.clear()
