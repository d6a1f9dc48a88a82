"""In place of CUDA's graphs: what is captured are operations, which a replay runs on the same memory.

An operation of the log is called with the arguments that it was captured with, tensors and numbers alike,
and its results are written where those of the capture are: a number that the host computed is as frozen as
in a graph. What is compiled for the host does not pass the dispatcher; of it the callable itself runs again
(``by_operators=False``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.lowering.graphs import captured, device


class RefusedError(RuntimeError):
    """What CUDA would refuse, or do wrong."""


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Log(TorchDispatchMode):
    """Operations as they run; those that wait for a device are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        masks = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        shaped = func is not torch.ops.aten.index.Tensor or any(
            t.dtype == torch.bool for t in masks[1:]
        )
        if tags & {*func.tags} and shaped or func in UNSAFE:
            raise RefusedError(f"operation not permitted when stream is capturing: {func}")
        found = func(*args, **(kwargs or {}))
        self.rows.append((func, args, kwargs or {}, found))
        return found


UNSAFE = {torch.ops.aten.histc.default, torch.ops.aten.mode.default}


class RecordedGraph:
    """What was captured."""

    def __init__(
        self, recorder: Recorder, run: Callable, made: Any, rows: list, generators
    ) -> None:
        self.recorder, self.run, self.made, self.rows = recorder, run, made, rows
        self.generators = generators
        self.replays, self.released = 0, False

    def replay(self) -> None:
        if self.released:
            raise RefusedError("the graph was released")
        if threading.get_ident() != self.recorder.thread:
            raise RefusedError("a replay from another thread than the pool's")
        self.replays += 1
        with torch.no_grad():
            if not self.recorder.by_operators:
                self.write(self.run(), self.made)
                return
            for func, args, kwargs, found in self.rows:
                again = func(*args, **kwargs)
                if func.namespace == "_c10d_functional":  # a copy would not wait for it
                    again = pytree.tree_map(torch.ops._c10d_functional.wait_tensor, again)
                given = {storage(t) for t in pytree.tree_leaves((args, kwargs)) if _is_tensor(t)}
                self.write(again, found, given)

    @staticmethod
    def write(again: Any, found: Any, given: set[int] = frozenset()) -> None:
        """Results where those of the capture are; what shares memory with an argument is there."""
        pairs = zip(pytree.tree_leaves(again), pytree.tree_leaves(found), strict=True)
        for new, old in pairs:
            if not _is_tensor(new) or not new.numel() or storage(old) in given:
                continue
            if storage(new) != storage(old):
                captured.bring(new, old)

    def release(self) -> None:
        if not self.recorder.group_is_there():
            raise RefusedError("the process group was destroyed before the graph")
        self.released = True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Recorder:
    """What captures, for one thread.

    Attributes:
        captures: what was captured, in order; ``events``: what was asked for.
    """

    def __init__(self, by_operators: bool = True) -> None:
        self.by_operators = by_operators
        self.thread = threading.get_ident()
        self.captures: list[RecordedGraph] = []
        self.events: list[str] = []
        self.group_is_there: Callable[[], bool] = lambda: True
        self._warm: set[Any] = set()
        self._capturing = False

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.events.append("warm up")
        self._warm.add(_code(run))
        return run()

    def capture(
        self, run: Callable[[], Any], generators: Sequence[Any]
    ) -> tuple[RecordedGraph, Any]:
        if self._capturing:
            raise RefusedError("a capture within a capture")
        if _code(run) not in self._warm:
            raise RefusedError("a capture before a warm-up")
        self.events.append("capture")
        inputs = [t for cell in run.__closure__ or () for t in _tensors(cell.cell_contents)]
        before = [(t, t.clone()) for t in inputs]
        self._capturing = True
        try:
            log = Log()
            with log:
                made = run()
        finally:
            self._capturing = False
        with torch.no_grad():
            for tensor, value in before:  # a capture launches nothing
                tensor.copy_(value)
            given = {storage(t) for t in inputs}
            for tensor in pytree.tree_leaves(made):
                if _is_tensor(tensor) and storage(tensor) not in given and _is_whole(tensor):
                    tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        graph = RecordedGraph(self, run, made, log.rows, generators)
        self.captures.append(graph)
        return graph, made

    def generator(self) -> torch.Generator:
        return torch.Generator()


def _is_whole(tensor: torch.Tensor) -> bool:
    return all(step for step in tensor.stride()) and tensor.dtype != torch.bool


def _tensors(value: Any) -> list[torch.Tensor]:
    """What a capture reads: the arguments that the stage holds."""
    if isinstance(value, captured.Captured):
        return value.given
    return []


def _code(run: Callable) -> Any:
    """Which stage it is of."""
    cells = [cell.cell_contents for cell in run.__closure__ or ()]
    return next(cell for cell in cells if isinstance(cell, captured.Captured))


@pytest.fixture
def recorder(monkeypatch):
    """Engines on the host capture with it."""
    yield from recording(monkeypatch, by_operators=True)


@pytest.fixture
def calling_recorder(monkeypatch):
    """The same for code that is compiled: a replay calls it."""
    yield from recording(monkeypatch, by_operators=False)


def recording(monkeypatch, by_operators):
    from dataclasses import replace

    from stepgraph.planning.target import usual_target
    from stepgraph.runtime import ranks

    made = Recorder(by_operators)
    device.forget_graphs()
    monkeypatch.setattr(device, "make_graphs", lambda where: made)
    monkeypatch.setattr(
        ranks, "usual_target", lambda kind: replace(usual_target(kind), graphs=True)
    )
    yield made
    device.forget_graphs()
