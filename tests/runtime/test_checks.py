"""What is looked at before a call, where everything is compared at once: nothing that counts is missed."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import CaptureError, UsageError
from stepgraph.torch_internals.writes import _COUNTS
from tests.beside import beside

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
FACTOR = 1.0

pytestmark = pytest.mark.skipif(not _COUNTS, reason="this Python does not count writes")


class Net(nn.Module):
    """Reads an attribute, a list, an ordered dictionary, a global, its class, a rate and a flag."""

    scale = 1.0  # the class's

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.act, self.rate = nn.Tanh(), 1.0
        self.sizes, self.order = [1.0, 2.0], OrderedDict(a=1.0, b=3.0)

    def forward(self, x):
        h = self.act(self.first(x)) * self.rate * self.sizes[0] * FACTOR * self.scale
        if self.training:
            h = h * next(iter(self.order.values()))
        return self.last(h).square().mean()


def attribute(model):
    model.rate = 0.5


def item(model):
    model.sizes[0] = 3.0


def order(model):
    model.order.move_to_end("a")


def of_the_class(model):
    next(cls for cls in type(model).__mro__ if cls.__name__ == "Made").scale = 0.25


def module(model):
    model.act = nn.Sigmoid()


def forward(model):
    model.first.forward = lambda x, own=model.first: nn.Linear.forward(own, x) * 2


def hook(model):
    model.first.register_forward_hook(lambda m, args, out: out * 0.5)


def mode(model):
    model.eval()


def frozen(model):
    model.last.bias.requires_grad_(False)


CHANGES = [attribute, item, order, of_the_class, module, forward, hook, mode, frozen]


@pytest.fixture
def both():
    """An engine, its model and one in plain PyTorch, and what takes the same steps with both."""
    engine, plain, steps = beside(type("Made", (Net,), {}), X)  # a class of this test's own
    return engine, (plain, engine.model), steps


def at_once(engine):
    """Whether the last call compared all at once, and found it as it was."""
    return engine._compiler.checks._same


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_behind_a_quiet_time_counts(both, change):
    engine, models, steps = both
    steps(8)
    assert at_once(engine)
    for model in models:
        change(model)
    steps(1)
    assert engine.stats.compiles == 2
    steps(12)
    assert at_once(engine) and engine.stats.compiles == 2
    for model in models:
        model.rate = 0.75
    steps(2)
    assert engine.stats.compiles == 3


def test_a_global_behind_a_quiet_time_counts(both, monkeypatch):
    engine, _, steps = both
    steps(8)
    assert at_once(engine)
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    steps(2)
    assert engine.stats.compiles == 2


def assigned(model):
    model.first.weight.data = model.first.weight.detach() * 0.5


def replaced(model):
    model.first.weight = nn.Parameter(torch.zeros(8, 6))


@pytest.mark.parametrize("change", [assigned, replaced])
def test_other_parameters_behind_a_quiet_time_are_refused(both, change):
    engine, (_, model), steps = both
    steps(8)
    assert at_once(engine)
    change(model)
    with pytest.raises(UsageError, match="first.weight"):
        engine.step(X)


def test_what_is_written_in_place_leaves_it_quiet(both):
    engine, models, steps = both
    steps(8)
    for model in models:
        model.first.weight.data.mul_(0.5)
    steps(1)
    assert at_once(engine) and engine.stats.compiles == 1


def test_a_model_that_is_evaluated_in_between_is_the_same(both):
    engine, (plain, _), steps = both
    for _ in range(6):
        steps(3)
        with torch.no_grad():
            torch.testing.assert_close(engine.evaluate(X), plain.eval()(X))
        plain.train()
    assert engine.stats.compiles == 2


def test_where_something_is_written_all_the_time_it_is_compared_at_once_seldom(both):
    engine, (plain, model), steps = both
    same = []
    for number in range(150):
        model.unread = plain.unread = number
        steps(1)
        same.append(at_once(engine))
    assert engine.stats.compiles == 1 and not any(same)
    assert engine._compiler.checks._wait == 64


def test_programs_are_not_kept_alive(both):
    engine, _, steps = both
    steps(8)
    checks = engine._compiler.checks
    assert checks._last() is not None
    engine._compiler._compiled.clear()
    assert checks._last() is None


class Rotating(nn.Module):
    """Reads the first value, and moves it behind the others."""

    def __init__(self):
        super().__init__()
        self.inner, self.order = nn.Linear(6, 1), OrderedDict(a=1.0, b=2.0)

    def forward(self, x):
        factor = next(iter(self.order.values()))
        self.order.move_to_end(next(iter(self.order)))
        return self.inner(x).square().mean() * factor


def test_a_forward_that_reorders_is_refused():
    """torch.compile has the first order at every call."""
    model = Rotating()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = stepgraph.Engine(model, loss=lambda m, x: m(x), optimizer=optimizer, lowering="eager")
    with pytest.raises(CaptureError, match="reorders an ordered dictionary .*Rotating.forward"):
        engine.step(X)
