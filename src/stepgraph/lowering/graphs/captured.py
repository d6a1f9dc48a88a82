"""A Program that is captured at its second call and replayed from then on.

The first call is the warm-up: it runs what will be captured, on the stream that captures, and is a step
like any other. The second captures, which runs nothing, and replays. What a call brings is copied into
buffers of its own; everything else must be where it was: that is checked at every replay.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from stepgraph.errors import LoweringError
from stepgraph.lowering.graphs import device
from stepgraph.lowering.graphs.draws import Draws
from stepgraph.lowering.record import Executable
from stepgraph.program import roles
from stepgraph.torch_internals import host_device

WARM_UPS = 1
LAST = "step"  # the program of a step that is its last; "accumulate" comes before it

_alive: weakref.WeakSet["Graphed"] = weakref.WeakSet()


def release_all() -> None:
    """Lets go of every graph of this process, before its process group goes.

    Called by the thread that uses them. What is called again captures again.
    """
    for graphed in list(_alive):
        graphed.release()
    device.forget_graphs()


@dataclass
class Stage:
    """A stretch of a Program: captured, or run as it is between what is.

    ``given`` and ``made``: nodes of the Program that it reads and hands on.
    """

    run: Executable
    given: list[fx.Node]
    made: list[fx.Node]
    captured: bool


class Graphed:
    """Runs the stages of a Program, those that are captured as graphs.

    Args:
        inputs: what each input is: what a call brings may lie anywhere, all else is written in place.
        communicates: collectives are captured with it.
        name: of the Program: those of a step advance the seed that they draw from, for the next.
    """

    def __init__(
        self,
        inputs: Sequence[roles.Input],
        placeholders: Sequence[fx.Node],
        results: Sequence[Any],
        stages: Sequence[Stage],
        communicates: bool,
        name: str = "",
    ) -> None:
        node_of = dict(zip(inputs, placeholders, strict=True))
        self.advances = roles.Seed() in node_of and name in (LAST, "accumulate")
        if self.advances:
            advancing = _advancing(stages[-1], node_of[roles.Seed()], name == LAST)
            stages = [*stages[:-1], advancing]
        self.inputs, self.placeholders, self.results = list(inputs), placeholders, results
        self.communicates = communicates
        self.host_seed = next(
            (i for i, role in enumerate(inputs) if isinstance(role, roles.HostSeed)), None
        )
        last = {node: i for i, stage in enumerate(stages) for node in stage.given}
        last |= {node: len(stages) for node in results if isinstance(node, fx.Node)}
        named = {node: roles.label(role) for node, role in zip(placeholders, inputs, strict=True)}
        fixed = set(placeholders)
        self.stages: list[tuple[Stage, Callable[[list, int, torch.device], Sequence[Any]]]] = []
        for stage in stages:
            if stage.captured:
                names = [
                    named.get(node, node.name) if node in fixed else None for node in stage.given
                ]
                self.stages.append((stage, Captured(stage.run, names)))
                fixed |= set(stage.made)
            else:
                self.stages.append((stage, lambda given, *_, run=stage.run: run(given)))
        self.over = [[node for node in last if last[node] == i] for i in range(len(stages))]
        self.buffers: dict[int, torch.Tensor] = {}
        _alive.add(self)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The results, in memory that no later call writes."""
        if self.communicates and not (dist.is_available() and dist.is_initialized()):
            raise LoweringError(
                "a step that communicates is run after its process group is gone",
                do="behind the last step call engine.close(), and then destroy the process group",
            )
        with torch.no_grad():
            held = dict(zip(self.placeholders, self._in_place(inputs), strict=True))
            seed = 0 if self.host_seed is None else int(inputs[self.host_seed])
            where = self._device(inputs)
            for (stage, run), over in zip(self.stages, self.over, strict=True):
                made = run([held[node] for node in stage.given], seed, where)
                held |= zip(stage.made, made, strict=True)
                for node in over:
                    del held[node]
            return [hand_out(held[n]) if isinstance(n, fx.Node) else n for n in self.results]

    def _device(self, inputs: Sequence[torch.Tensor]) -> torch.device:
        """Which one computes: the host has the seed, and states that wait there."""
        places = [t.device for i, t in enumerate(inputs) if i != self.host_seed]
        return next((one for one in places if one.type != host_device().type), places[0])

    def _in_place(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs, those that a call brings copied to where they always are."""
        placed = list(inputs)
        for i, role in enumerate(self.inputs):
            if isinstance(role, roles.BROUGHT):
                if i not in self.buffers:
                    self.buffers[i] = like(placed[i])
                _check_layout(roles.label(role), placed[i], self.buffers[i])
                placed[i] = bring(placed[i], self.buffers[i])
        return placed

    def release(self) -> None:
        """Lets go of the graphs; the next calls warm up and capture again."""
        for _, run in self.stages:
            if isinstance(run, Captured):
                run.release()


def _advancing(stage: Stage, seed: fx.Node, last: bool) -> Stage:
    """A stage behind which the next micro-batch, or the next step, draws."""

    def run(given: Sequence[torch.Tensor]) -> Sequence[Any]:
        *given, words = given
        found = stage.run(given)
        if last:
            words[1].add_(1)
            words[2].zero_()
        else:
            words[2].add_(1)
        return found

    return Stage(run, [*stage.given, seed], stage.made, stage.captured)


class Captured:
    """One stage: warmed up, captured, replayed.

    Args:
        names: what each argument is, for messages; None: it is elsewhere at every call, and is copied.
    """

    def __init__(self, run: Executable, names: Sequence[str | None]) -> None:
        self.run, self.names = run, names
        self.draws = Draws()
        self.release()

    def release(self) -> None:
        """Lets go of the graph, if there is one."""
        graph = getattr(self, "graph", None)
        if graph is not None:
            graph.release()
        self.graph: device.Graph | None = None
        self.warm = 0
        self.given: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.made: Sequence[Any] = []
        self.thread = 0

    def __call__(self, given: list[torch.Tensor], seed: int, where: torch.device) -> Sequence[Any]:
        """What it makes: where it always is, once it is captured.

        Args:
            seed: of kernels that draw.
            where: the device that computes.

        Raises:
            LoweringError: an argument is not where it was, or this is another thread; torch could not
                capture it.
        """
        if self.graph is not None:
            self._check(given)
            for now, held, name in zip(given, self.given, self.names, strict=True):
                if name is None:
                    bring(now, held)
        elif self.warm < WARM_UPS:
            self.warm += 1
            with self.draws.warming(seed):
                return device.graphs_of(where).warm_up(lambda: self.run(given))
        else:
            self._capture(given, where)
        assert self.graph is not None
        self.draws.seed(seed)
        self.graph.replay()
        return self.made

    def _capture(self, given: list[torch.Tensor], where: torch.device) -> None:
        graphs = device.graphs_of(where)
        pairs = zip(given, self.names, strict=True)
        self.given = [bring(t, like(t)) if name is None else t for t, name in pairs]
        self.addresses = [tensor.data_ptr() for tensor in self.given]
        self.thread = threading.get_ident()
        with self.draws.capturing(graphs.generator):
            try:
                self.graph, self.made = graphs.capture(
                    lambda: self.run(self.given), self.draws.generators
                )
            except RuntimeError as error:
                raise LoweringError(
                    "torch could not capture the step as a CUDA graph",
                    why=str(error).strip().splitlines()[0],
                    do="lowering='inductor' runs it; what is known to be in the way is told before "
                    "(plan.obstacles), so please report this",
                ) from error

    def _check(self, given: Sequence[torch.Tensor]) -> None:
        """That arguments are where they were, and that it is the thread whose pool this is."""
        if threading.get_ident() != self.thread:
            raise LoweringError(
                "a CUDA graph is replayed by another thread than the one that captured it",
                why="what it computes with is in that thread's pool, which another may be using",
                do="call the engine from one thread",
            )
        for now, held, address, name in zip(
            given, self.given, self.addresses, self.names, strict=True
        ):
            if name is None:
                continue
            if now.data_ptr() != address:
                raise LoweringError(
                    f"{name} is not where it was when the step was captured",
                    why="a CUDA graph reads the old place, whatever is there now",
                    do="change it in place (copy_), or make a new Engine",
                )
            if now is not held:
                _check_layout(name, now, held)


def _check_layout(name: str, now: torch.Tensor, held: torch.Tensor) -> None:
    if (now.shape, _steps(now), now.dtype) != (held.shape, _steps(held), held.dtype):
        raise LoweringError(
            f"{name} is {list(now.shape)} {now.dtype}, and the graph was captured with "
            f"{list(held.shape)} {held.dtype}",
            do="every shape has a graph of its own: call the engine, which finds it",
        )


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides, of dimensions with more than one place."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [step for size, step in sizes if size > 1]


# -- copies


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Each element once: of a dimension that is expanded, the first."""
    sizes = [
        1 if not step else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own for a tensor, laid out alike, and pinned where that is."""
    kind = {"dtype": tensor.dtype, "device": tensor.device, "pin_memory": tensor.is_pinned()}
    return torch.empty_strided(tensor.shape, tensor.stride(), **kind)


def bring(tensor: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Copies a tensor into one that is laid out alike; from pinned memory nothing waits."""
    _memory(to).copy_(_memory(tensor), non_blocking=True)
    return to


def hand_out(value: Any) -> Any:
    """A copy, which the next replay does not write; what is no tensor as it is."""
    return bring(value, like(value)) if isinstance(value, torch.Tensor) else value
