"""A checking mode: at every run of a program, that what a graph would need holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.lowering.graphs.captured import Graphed
from stepgraph.program import roles
from stepgraph.runtime.executor import LoweredProgram


def place(tensor: torch.Tensor) -> tuple:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.stride(),
        tensor.shape,
    )


class StaticAddresses:
    """Watches every run of every program of this process.

    Attributes:
        runs: programs by name, as they ran; ``seeds``: what random operations drew from.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.runs: list[str] = []
        self.seeds: list[tuple[int, ...]] = []
        self.places: dict[tuple[int, roles.Input], tuple] = {}
        self.constants: dict[int, str] = {}
        self.kept: list[Any] = []
        run = LoweredProgram.run

        def watched(lowered: LoweredProgram, leaves: Sequence[Any] = (), brought: Any = None):
            self.before(lowered, leaves)
            found = run(lowered, leaves, brought)
            self.after(lowered, found)
            return found

        monkeypatch.setattr(LoweredProgram, "run", watched)

    def before(self, lowered: LoweredProgram, leaves: Sequence[Any]) -> None:
        self.kept.append(lowered)  # its number is not another's
        self.runs.append(lowered.program.name)
        open_places = {position for position, _ in lowered.places}
        inputs = enumerate(zip(lowered.program.inputs, lowered.arguments, strict=False))
        numbers = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        shown = self.constants.setdefault(id(lowered), repr(numbers))
        assert shown == repr(numbers), "a number of the batch changed"
        for position, (_, tensor) in inputs:
            if position in open_places:
                continue
            assert isinstance(tensor, torch.Tensor), "an argument is a number of Python"
        self.check(lowered)
        seeds = [t for t in lowered.arguments if t is not None and self.is_seed(lowered, t)]
        self.seeds += [tuple(seed.tolist()) for seed in seeds]

    def is_seed(self, lowered: LoweredProgram, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int64 and tensor.shape == (3,)

    def check(self, lowered: LoweredProgram) -> None:
        """Everything that outlives a step is where it was when this program ran first."""
        for number, tensor in enumerate(lowered.arguments):
            if tensor is not None:
                found = self.places.setdefault((id(lowered), number), place(tensor))
                assert found == place(tensor), f"argument {number} of {lowered.program.name} moved"
        if isinstance(lowered.execute, Graphed):
            for number, buffer in lowered.execute.buffers.items():
                found = self.places.setdefault((id(lowered.execute), number), place(buffer))
                assert found == place(buffer), f"the buffer of input {number} moved"

    def after(self, lowered: LoweredProgram, found: dict) -> None:
        """In place: nothing that a program returns is state."""
        self.check(lowered)
        held = {place(tensor)[0] for tensor in lowered.arguments if tensor is not None}
        for role, tensor in found.items():
            assert roles.written_input(role) is None, f"{role} is a result"
            assert not tensor.numel() or place(tensor)[0] not in held, f"{role} is a part of state"
