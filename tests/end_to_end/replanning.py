"""Runs that are planned again: machines whose costs are known, and what was measured on them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stepgraph
from stepgraph.cost.calibration import UNCALIBRATED, VARIABLE, to_json
from stepgraph.cost.correction import Correction, corrected
from stepgraph.cost.device import Device, Link
from stepgraph.cost.predict import Prediction
from stepgraph.pipeline import foresee
from stepgraph.runtime.meter import Meter

WIDTH, LAYERS, ROWS = 64, 2, 4096
# Updates take long, which zero1 halves; an all-reduce is fast, and so ddp is, if they take half as long.
# Activations are too large to be sent.
MACHINE = replace(
    UNCALIBRATED,
    matmul=dict.fromkeys(UNCALIBRATED.matmul, 1e13),
    memory_bandwidth=1e12,
    kernel_seconds=1e-6,
    half_flops=0.0,
    half_bytes=0.0,
    intra=Link(3.5e-4, 3e8),
    collectives={"all_reduce": Link(5e-5, 3e8), "reduce_scatter": Link(3.5e-4, 3e8)},
    elements={"root": 1.2e-7},
    source="made up",
)


@contextlib.contextmanager
def calibrated(device: Device) -> Iterator[None]:
    """Inside, this is what the calibration says of the host."""
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        path.write_text(to_json({device.name: device}))
        os.environ[VARIABLE] = str(path)
        try:
            yield
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


class OnDevice(Meter):
    """Everything runs; what it takes is what the cost model says of a device, exactly.

    ``slower``: times of this rank over those of others.
    """

    def __init__(self, engine: stepgraph.Engine, device: Device, slower: float = 1.0) -> None:
        super().__init__(torch.device("cpu"))
        self.engine, self.costs, self.slower = engine, device, slower
        self._real = Meter(torch.device("cpu"))
        self._known: dict[int, Prediction] = {}

    def _foreseen(self) -> Prediction:
        request, programs = self.engine.plan.request, self.engine.programs
        steps, key = request.step.micro_batches, id(programs["step"])
        if key not in self._known:
            self._known[key] = foresee(programs, self.costs, request.lowering, steps)
        return self._known[key]

    def timed(self, run: Any) -> Any:
        return run(), self._foreseen().step_ms / 1e3 * self.slower

    def communication(self, programs: Any, groups: Any) -> float | None:
        self._real.communication(programs, groups)
        return self._foreseen().communication_ms / 1e3


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(LAYERS):
        parts += [nn.Linear(WIDTH, WIDTH), nn.GELU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*parts)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def batch_of(step: int, ranks: int, rank: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(rows, WIDTH, generator=generator).chunk(ranks)[rank]}


def engine_of(model: nn.Module | None = None, **settings: Any) -> stepgraph.Engine:
    """An engine whose plan is searched for, under the eager lowering."""
    model = layers() if model is None else model
    settings = {"plan": "auto", "lowering": "eager"} | settings
    if "optimizer" not in settings:
        settings["optimizer"] = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return stepgraph.Engine(model, loss=loss_of, **settings)


def times(**factors: float) -> Device:
    """The machine, so many times as slow."""
    return corrected(MACHINE, Correction(**factors))


def whole(engine: stepgraph.Engine) -> dict[str, torch.Tensor]:
    """Parameters and optimizer states, whole."""
    tensors = dict(engine.model.named_parameters())
    assert engine._optimizer is not None
    for index, states in engine._optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in states.items()}
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in tensors.items()
    }
