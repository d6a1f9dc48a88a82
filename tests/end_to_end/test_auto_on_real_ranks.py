"""``plan="auto"`` on real gloo ranks trains five models as plain PyTorch does in one process."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils import _pytree as pytree

import stepgraph
from stepgraph.capture.module import default_loss
from stepgraph.cli.launcher import launch
from stepgraph.runtime.ranks import parse_mesh
from tests.placement.solver.test_auto_execution import MODELS

NAMES = ("llama", "gpt2", "bert", "vit", "conv")
STEPS, RATE = 3, 0.1
# As in test_unmodified_models: some layers deep, a gradient is off by 2^8 eps of its largest entry.
TOLERANCE = 256 * torch.finfo(torch.float32).eps


def trained(mesh: str) -> dict[str, tuple]:
    """One rank: losses, whole parameters and gaps of each model."""
    shape, rank, found = parse_mesh(mesh), int(os.environ["RANK"]), {}
    for name in NAMES:
        model, batch = MODELS[name]()
        engine = stepgraph.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
            mesh=mesh,
            plan="auto",
            lowering="eager",
        )
        row = shape.data_rank(rank)
        part = pytree.tree_map(lambda t, row=row: t.chunk(shape.data_size)[row], batch)
        losses = [engine.step(part).item() for _ in range(STEPS)]
        parameters = {n: p.detach().full_tensor() for n, p in engine.model.named_parameters()}
        placed = [made.placement for made in engine.plan.decisions.values()]
        gaps = [(where.preset, where.optimality_gap) for where in placed]
        found[name] = losses, parameters, gaps
    return found


def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by torch alone."""
    model, batch = MODELS[name]()
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
    for _ in range(STEPS):
        loss = default_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "tp=2", "replicate=2,shard=2"])
def test_five_models_train_as_in_plain_pytorch(mesh):
    ranks = launch(trained, mesh, ranks=parse_mesh(mesh).world_size)
    for name in NAMES:
        losses, parameters = plain(name)
        for found in ranks:
            ours, whole, gaps = found[name]
            assert ours == pytest.approx(losses, rel=TOLERANCE), name
            assert gaps and all((gap is None) == (preset != "auto") for preset, gap in gaps)
            for key, value in whole.items():
                scale = max(1.0, parameters[key].abs().max().item())
                off = (value - parameters[key]).abs().max().item()
                assert off <= TOLERANCE * scale, (name, key, off)
