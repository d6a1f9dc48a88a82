"""Which loss it is that ranks minimise where the model is captured graph by graph."""

from __future__ import annotations

import os

import pytest
import torch

import stepgraph
from stepgraph.frontends.launcher import launch
from tests.end_to_end.test_balance import Model

ROWS = 8
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)


@torch._dynamo.disable
def outside(y, weights):
    return (y.square().sum(1) * weights).sum() / weights.sum()


LOSSES = {
    "a mean": lambda y, w: y.square().mean(),
    "a sum": lambda y, w: y.square().sum(),
    "a sum over the rows' number": lambda y, w: y.square().sum() / len(y),
    "a weighted mean": lambda y, w: (y.square().sum(1) * w).sum() / w.sum(),
    "no graph's": outside,
}


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 4, generator=generator), torch.rand(ROWS, generator=generator)


def made():
    torch.manual_seed(0)
    return Model()


def run():
    """One rank: value and gradients for each loss."""
    rank, found = int(os.environ["RANK"]), {}
    x, weights = (part.chunk(2)[rank] for part in batch())
    for name, loss in LOSSES.items():
        model = made()
        engine = stepgraph.Engine(
            model, loss=lambda m, b, loss=loss: loss(m(b[0]), b[1]), plan="zero3", lowering="eager"
        )
        value = engine((x, weights))
        value.backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        found[name] = value.item(), gradients, [n for n in engine.notes if n.startswith("loss")]
    return found


@pytest.fixture(scope="module")
def found():
    return launch(run, ranks=2)[0]


def expected(name):
    model, (x, weights) = made(), batch()
    if name == "no graph's":
        pairs = zip(x.chunk(2), weights.chunk(2), strict=True)
        value = sum(outside(model(part), weight) for part, weight in pairs) / 2
    else:
        value = LOSSES[name](model(x), weights)
    value.backward()
    return value.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_a_graph_makes_is_that_of_one_process(name, found):
    value, gradients, notes = found[name]
    wanted, whole = expected(name)
    assert value == pytest.approx(wanted, rel=1e-5)
    for gradient, other in zip(gradients, whole, strict=True):
        torch.testing.assert_close(gradient, other)
    own = name in ("a sum over the rows' number", "no graph's")
    assert bool(notes) == own, notes
