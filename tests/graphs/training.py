"""A small model with all that a step has to keep at its place, and runs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import stepgraph

WIDTH, ROWS = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Residual blocks with dropout, and a buffer that every forward writes."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.between = between
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.between is not None:
                x = self.between(x)
        self.seen += x.detach().abs().mean()
        return ((self.head(x)[:, 0] - y) ** 2).mean()


def model(between: Any = None) -> Blocks:
    torch.manual_seed(0)
    return Blocks(between)


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=random), torch.randn(rows, generator=random)


@dataclass
class Run:
    """What a run came to: losses as they were handed out, and everything that a step writes."""

    engine: stepgraph.Engine
    losses: list[torch.Tensor]
    evaluated: list[torch.Tensor]

    def state(self) -> dict[str, torch.Tensor]:
        held = self.engine._state.tensors
        return {str(role): tensor for role, tensor in held.items()}


def start(lowering: str, between: Any = None, **options: Any) -> stepgraph.Engine:
    made = model(between)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    how = {"plan": "zero3", "max_grad_norm": 0.5} | options
    return stepgraph.Engine(made, optimizer=optimizer, lowering=lowering, **how)


def train(lowering: str, steps: int, between: Any = None, **options: Any) -> Run:
    """Steps with a schedule of learning rates, and evaluations in between."""
    engine = start(lowering, between, **options)
    schedule = torch.optim.lr_scheduler.StepLR(engine._optimizer, 3, 0.7)
    losses, evaluated = [], []
    for step in range(steps):
        losses.append(engine.step(batch(step)))
        schedule.step()
        if step % 5 == 4:
            evaluated.append(engine.evaluate(batch(1000)))
    return Run(engine, losses, evaluated)


def assert_same(found: Run, expected: Run) -> None:
    """Bitwise: losses of every step, evaluations, parameters, buffers, optimizer state, its counters.

    The seed is not: a captured step leaves it as the next one needs it.
    """
    results = [torch.stack([*run.losses, *run.evaluated]) for run in (found, expected)]
    assert torch.equal(*results), results
    states, wanted = found.state(), expected.state()
    assert states.keys() == wanted.keys()
    for name, tensor in states.items():
        assert name == "Seed()" or torch.equal(tensor, wanted[name]), name
