"""What dynamo's guards leave out: it is looked at all the same."""

import pytest
import torch
from torch import nn

import stepgraph

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def classes():
    """A model's class, the one below it, and that of a helper: of one test."""

    class Helper:
        gain = 1.0

        def scaled(self, x):
            return x * self.gain

    class Below(nn.Module):
        rate = 1.0

        def __init__(self):
            super().__init__()
            self.inner, self.helper = nn.Linear(6, 1), Helper()

        @property
        def shift(self):
            return 0.5

        @staticmethod
        def squared(x):
            return x.square()

        def centred(self, x):
            return x - self.shift

        def forward(self, x):
            h = self.helper.scaled(self.centred(self.inner(x)))
            return self.squared(h).mean() * self.rate

    return type("Model", (Below,), {}), Below, Helper


def method(cls):
    cls.centred = lambda self, x: x + 0.25


def its_property(cls):
    cls.shift = property(lambda self: 0.25)


def static_method(cls):
    cls.squared = staticmethod(lambda x: x.abs())


def constant(cls):
    cls.rate = 0.5


def forward(cls):
    cls.forward = lambda self, x: self.inner(x).square().mean() * 0.5


@pytest.mark.parametrize("steps", [1, 8], ids=["at once", "behind a quiet time"])
@pytest.mark.parametrize("place", [0, 1], ids=["in front", "where it was"])
@pytest.mark.parametrize("change", [method, its_property, static_method, constant, forward])
def test_members_of_classes_count(change, place, steps):
    made = classes()
    engine, both = beside(made[0])
    both(steps)
    change(made[place])
    both(3)
    assert engine.stats.compiles == 2


def test_members_of_a_helpers_class_count():
    made = classes()
    engine, both = beside(made[0])
    both(4)
    made[2].scaled = lambda self, x: x * 0.5
    both(3)
    assert engine.stats.compiles == 2


def test_members_that_nothing_reads_do_not_count():
    made = classes()
    engine, both = beside(made[0])
    both(4)
    for cls in made:
        cls.unread, cls.other = 1.0, lambda self: 2.0
    both(3)
    assert engine.stats.compiles == 1


def beside(cls):
    """An engine, and what takes the same steps with it and in plain PyTorch."""
    torch.manual_seed(0)
    plain, model = cls(), cls()
    model.load_state_dict(plain.state_dict())
    twin, own = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model))
    engine = stepgraph.Engine(
        model, loss=lambda m, x: m(x), optimizer=own, plan="ddp", lowering="eager"
    )

    def both(count):
        for _ in range(count):
            twin.zero_grad()
            expected = plain(X)
            expected.backward()
            twin.step()
            torch.testing.assert_close(engine.step(X), expected.detach())

    return engine, both
