"""Compiled programs call kernels at once, and kernels that compute gradients themselves still can."""

import numpy
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.lowering import inductor

LIBRARY = torch.library.Library("stepgraph_tests", "DEF")  # noqa: TOR901  as long as the process
LIBRARY.define("cube_slope(Tensor x) -> Tensor")


def cube_slope(x):
    """3 x^2, by a gradient within the kernel."""
    with torch.enable_grad():
        y = x.detach().clone().requires_grad_()
        total = (y**3).sum()
        if not total.requires_grad:
            return torch.zeros_like(x)
        return torch.autograd.grad(total, y)[0]


LIBRARY.impl("cube_slope", cube_slope, "CPU")
LIBRARY.impl("cube_slope", lambda x: torch.empty_like(x), "Meta")


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x + torch.ops.stepgraph_tests.cube_slope(x.detach())))
        return x


@pytest.mark.parametrize("layers", [1, 6])  # whole, and in pieces
def test_a_kernel_that_computes_gradients(layers):
    batch = torch.randn(3, 4)
    losses = {}
    for lowering in ("eager", "inductor"):
        model = Model(layers)
        engine = stepgraph.Engine(
            model,
            loss=lambda m, b: m(b["x"]).square().mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            plan="ddp",
            lowering=lowering,
        )
        losses[lowering] = [engine.step({"x": batch}).item() for _ in range(3)]
    plain = Model(layers)
    expected = plain(batch).square().mean().item()
    assert losses["eager"][0] == pytest.approx(expected, rel=1e-5)
    assert losses["inductor"] == pytest.approx(losses["eager"], rel=1e-5)


def test_torchs_own_operators_are_not_asked_about_gradients(monkeypatch):
    below = []
    monkeypatch.setattr(inductor, "below_autograd", lambda run: below.append(run) or run)
    model = nn.Linear(4, 1)
    engine = stepgraph.Engine(
        model,
        loss=lambda m, b: m(b["x"]).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lowering="inductor",
    )
    engine.step({"x": torch.ones(2, 4)})
    assert len(below) == 1


def test_a_learning_rate_of_numpy_is_a_number():
    results = []
    for rate in (0.5, numpy.float32(0.5)):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = stepgraph.Engine(model, loss=lambda m, b: m(b["x"]).mean(), optimizer=optimizer)
        engine.step({"x": torch.ones(2, 4)})
        optimizer.param_groups[0]["lr"] = rate
        results.append([engine.step({"x": torch.ones(2, 4)}).item() for _ in range(3)])
    assert results[0] == results[1]
