"""Parameters that no graph reads, recurrent layers, buffers, saved and resumed: graph by graph."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch

STEPS = 4


class Outside(nn.Module):
    """Branches on data; a parameter is read by code that dynamo does not see; a buffer counts."""

    def __init__(self):
        super().__init__()
        self.first, self.recurrent = nn.Linear(4, 6), nn.LSTM(6, 5, batch_first=True)
        self.scale, self.last = nn.Parameter(torch.full((5,), 1.5)), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    @torch._dynamo.disable
    def scaled(self, hidden):
        return hidden * self.scale

    def forward(self, x):
        hidden = self.first(x).relu()
        if hidden.mean() > -1:
            hidden = hidden + 0
        hidden, _ = self.recurrent(hidden)
        self.seen.add_(1)
        return self.last(self.scaled(hidden))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def batch_of(step, rank=0, ranks=1):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 3, 4, generator=generator), torch.randn(8, 3, 3, generator=generator)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def made(seed=0):
    torch.manual_seed(seed)
    model = Outside()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def run(cells, folder):
    """One rank: for each cell, a run and one that goes on from its save half-way."""
    rank, found = int(os.environ["RANK"]), []
    for number, (plan, micro_batches, whole) in enumerate(cells):
        engines = []
        for seed in (0, 1):
            model, optimizer = made(seed)
            engine = stepgraph.Engine(
                model, loss=loss, optimizer=optimizer, plan=plan, lowering="eager",
                micro_batches=micro_batches, max_grad_norm=0.3,
            )  # fmt: skip
            engine.compile("eager", compiled_autograd=whole)
            engines.append(engine)
        for step in range(STEPS):
            if step == STEPS // 2:
                engines[0].save(f"{folder}/{number}")
                engines[1].load(f"{folder}/{number}")
            losses = [
                engine.step(batch_of(step, rank, 2)).item()
                for engine in engines[: 1 + (step >= STEPS // 2)]
            ]
        values = [
            {name: value.full_tensor() for name, value in engine.state_dict().items()}
            for engine in engines
        ]
        evaluated = engines[0].evaluate(batch_of(9, rank, 2)).item()
        found.append((losses, values, evaluated, engines[0].stats.recompiles))
    return found


@pytest.mark.parametrize(
    "cells",
    [
        [("zero3", 1, False)],
        pytest.param([("ddp", 2, True), ("zero2", 1, True)], marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_plain_pytorch(cells, tmp_path):
    model, optimizer = made()
    for step in range(STEPS):
        value = loss(model, batch_of(step))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: t for name, t in model.state_dict().items() if name != "seen"}
    with torch.no_grad():
        wanted = loss(model, batch_of(9)).item()
    for losses, values, evaluated, recompiles in launch(run, cells, str(tmp_path), ranks=2)[0]:
        assert losses == pytest.approx([value.item()] * 2, rel=1e-5)
        assert evaluated == pytest.approx(wanted, rel=1e-5) and not recompiles
        for state in values:
            for name, whole in expected.items():
                torch.testing.assert_close(state[name], whole, msg=name)
