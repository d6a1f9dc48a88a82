"""A lowering that cannot execute a Program gives way to the next best, and says so."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import LoweringError, StrictError
from stepgraph.lowering.decide import decide
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.lowering.record import Lowering, Obstacle
from tests.support import adamw, mlp, regression_batch

REASON = "refuses cannot run program 'step': it refuses"


def obstacles(program, target):
    return [Obstacle("", "", "", "it refuses", "ask for another")]


def make(program, target):
    raise AssertionError("what is refused is not lowered")


@pytest.fixture
def others():
    """The lowerings with one before them that executes nothing."""
    known = dict(LOWERINGS)
    LOWERINGS.clear()
    LOWERINGS.update({"refuses": Lowering("refuses", obstacles, make), "eager": known["eager"]})
    yield
    LOWERINGS.clear()
    LOWERINGS.update(known)


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x)
        print(end="")
        return self.second(hidden).mean()


def engine(**options):
    model = mlp()
    return stepgraph.Engine(model, optimizer=adamw(model), lowering="refuses", **options)


def test_the_next_best_runs_and_the_report_says_why(others):
    first = engine()
    assert first.step(regression_batch()).isfinite()
    assert any(REASON in note and "runs under eager" in note for note in first.notes), first.notes
    assert first.plan.decisions["step"].lowering.name == "eager"


def test_what_is_checked_is_what_runs(others):
    first = engine()
    first.step(regression_batch())
    report = stepgraph.check(first, regression_batch())
    assert report.ok, report


def test_strict_is_an_error(others):
    with pytest.raises(StrictError, match=REASON):
        engine(strict=True).step(regression_batch())


def test_graph_by_graph_says_so_too(others):
    model = Printing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = stepgraph.Engine(model, optimizer=optimizer, lowering="refuses")
    assert first.step(torch.ones(2, 4)).isfinite()
    assert any("refuses cannot run program" in note for note in first.notes), first.notes


def test_where_none_can_the_error_has_the_reason_of_each(others):
    del LOWERINGS["eager"]
    program = type("Program", (), {"name": "step"})()
    with pytest.raises(LoweringError, match="no lowering can run program 'step'") as error:
        decide(program, "refuses", None)
    assert REASON in str(error.value)
