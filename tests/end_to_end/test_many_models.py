"""Models and modules that nobody asked for train as plain PyTorch trains them.

Under zero3 and under tp, operator by operator; and in one process as they are compiled by default, with an
optimizer whose fused kernel stands among the backward.
"""

from __future__ import annotations

import copy

import pytest
import torch

import stepgraph
from stepgraph.capture.module import default_loss
from tests.end_to_end.many_models import ARCHITECTURES, make
from tests.end_to_end.many_modules import MODULES
from tests.one_process import OneProcessRun

STEPS = 2
# As in test_unmodified_models: gradients are summed up in another order.
TOLERANCE = 256 * torch.finfo(torch.float32).eps
CELLS = [("zero3", "dp=2"), ("tp", "tp=2")]

pytestmark = [
    pytest.mark.slow,
    # transformers and torch warn about their own defaults; what stepgraph says is not a warning.
    pytest.mark.filterwarnings("ignore"),
]


def sgd(model):
    learned = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(learned, lr=0.05, momentum=0.9)


def adamw(model):
    """A large ``eps`` shows the size of a gradient, not only its sign."""
    learned = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(learned, lr=1e-2, eps=1e-3)


def plain(model, batch, loss, make_optimizer=sgd):
    """Losses and the trained model of plain PyTorch."""
    model = copy.deepcopy(model)
    optimizer, losses = make_optimizer(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model


def assert_trains_alike(model, batch, loss):
    expected, trained = plain(model, batch, loss)
    captured = None
    for plan, mesh in CELLS:
        mine = copy.deepcopy(model)
        run = OneProcessRun(
            mine, loss=loss, optimizer=sgd(mine), mesh=mesh, plan=plan, captured=captured
        )
        losses = [run.step(batch).item() for _ in range(STEPS)]
        captured = run.captured
        assert losses == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
        assert_same_values(run.parameters() | run.buffers(), trained, plan)


def assert_same_values(found, trained, how):
    wanted = dict(trained.named_parameters()) | dict(trained.named_buffers())
    for name in found.keys() & wanted.keys():
        if not wanted[name].is_floating_point():
            continue
        scale = max(1.0, wanted[name].abs().max().item())
        torch.testing.assert_close(
            found[name],
            wanted[name].detach(),
            rtol=0,
            atol=4 * TOLERANCE * scale,
            msg=lambda m, n=name: f"{n} under {how}: {m}",
        )


def assert_trains_alike_by_default(model, batch, loss):
    expected, trained = plain(model, batch, loss, adamw)
    engine = stepgraph.Engine(model, loss=loss, optimizer=adamw(model), lowering="inductor")
    losses = [engine.step(batch).item() for _ in range(STEPS)]
    assert losses == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    found = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
    assert_same_values(found | dict(model.named_buffers()), trained, "inductor")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_as_in_plain_pytorch(name):
    model, batch = make(name)
    assert_trains_alike(model, batch, default_loss)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_in_plain_pytorch(name):
    model, batch, loss = MODULES[name]()
    assert_trains_alike(model.train(), batch, loss)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_by_default_as_in_plain_pytorch(name):
    model, batch = make(name)
    assert_trains_alike_by_default(model, batch, default_loss)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_by_default_as_in_plain_pytorch(name):
    model, batch, loss = MODULES[name]()
    assert_trains_alike_by_default(model.train(), batch, loss)
