"""Losses made of torch's distributions are captured whole, from the first in a process on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

import stepgraph

LOSSES = {
    "normal": lambda a, b, x: -D.Normal(a, b).log_prob(x).mean(),
    "independent": lambda a, b, x: -D.Independent(D.Normal(a, b), 1).log_prob(x).mean(),
    "categorical": lambda a, b, x: -D.Categorical(logits=a).log_prob((x[:, 0] > 0).long()).mean(),
    "entropy": lambda a, b, x: -D.Beta(b, b + 1).entropy().mean(),
    "divergence": lambda a, b, x: D.kl_divergence(D.Normal(a, b), D.Normal(x, 1.0)).mean(),
    "student": lambda a, b, x: -D.StudentT(b + 2, a, b).log_prob(x).mean(),
    "multivariate": lambda a, b, x: (
        -D.MultivariateNormal(a, scale_tril=torch.diag_embed(b)).log_prob(x).mean()
    ),
}


class Policy(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 4), loss

    def forward(self, x):
        h = self.layer(x)
        return self.loss(h[:, :2], F.softplus(h[:, 2:]) + 0.1, x[:, :2])


@pytest.fixture
def checked():
    """Arguments are checked by default, as in a process that has compiled nothing."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("name", LOSSES)
def test_they_are_captured_whole_and_train_as_in_plain_pytorch(checked, name):
    torch.manual_seed(0)
    model, x = Policy(LOSSES[name]), torch.randn(8, 8)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lowering="eager"
    )
    with stepgraph.no_recompiles(after=1):
        losses = [engine.step(x).item() for _ in range(3)]
    assert engine.graph_by_graph() is None
    plain = Policy(LOSSES[name])
    plain.load_state_dict(state)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        expected = plain(x)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_outside_of_the_capture_arguments_are_checked_as_before(checked):
    x = torch.randn(8, 8)
    model = Policy(LOSSES["normal"])
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lowering="eager"
    )
    engine.step(x)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        D.Normal(torch.zeros(2), -torch.ones(2))


def test_the_first_of_a_process_is_too():
    program = (
        "import torch, torch.distributions as D, stepgraph\n"
        "def divergence(a, b): return D.kl_divergence(D.Normal(a, 1.0), D.Normal(b, 1.0)).mean()\n"
        "model = torch.nn.Linear(4, 4)\n"
        "engine = stepgraph.Engine(model, loss=lambda m, x: divergence(m(x), x),\n"
        "    optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lowering='eager')\n"
        "engine.step(torch.ones(2, 4))\n"
        "print(engine.graph_by_graph(), D.Distribution._validate_args)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "None True\n", run.stderr
