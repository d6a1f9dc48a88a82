"""What dynamo's guards leave out: it is looked at all the same."""

import pytest
import torch
from torch import nn

from tests.beside import beside

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def classes():
    """A model's class, the one below it, and that of a helper: of one test alone."""

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


@pytest.mark.parametrize("steps", [2, 12], ids=["at once", "behind a quiet time"])
@pytest.mark.parametrize("place", [0, 1], ids=["in front", "where it was"])
@pytest.mark.parametrize("change", [method, its_property, static_method, constant, forward])
def test_members_of_classes_count(change, place, steps):
    made = classes()
    engine, _, both = beside(made[0], X)
    both(steps)
    change(made[place])
    both(3)
    assert engine.stats.compiles == 2


def test_members_of_a_helpers_class_count():
    made = classes()
    engine, _, both = beside(made[0], X)
    both(4)
    made[2].scaled = lambda self, x: x * 0.5
    both(3)
    assert engine.stats.compiles == 2


def test_members_that_nothing_reads_do_not_count():
    made = classes()
    engine, _, both = beside(made[0], X)
    both(4)
    for cls in made:
        cls.unread, cls.other = 1.0, lambda self: 2.0
    both(3)
    assert engine.stats.compiles == 1


class Proxy:
    """What a class may have as a member."""

    @property
    def __class__(self):
        raise RuntimeError("outside of its context")


class Scaled:
    """What is found by a global name."""

    gain, proxy = 1.0, Proxy()

    def scaled(self, x):
        return x * self.gain


HELPER = Scaled()


class Reading(nn.Module):
    """Reads a global helper, a helper of its class, lists in tuples, and hides nothing of its parts."""

    def __init__(self, part, own):
        super().__init__()
        self.inner, self.pair, self.table = part(6, 1), ([1.0, 2.0],), {"a": ([1.0], 3)}
        type(self).own = own

    def forward(self, x):
        h = HELPER.scaled(self.own.scaled(self.inner(x)))
        return h.square().mean() * self.pair[0][0] * self.table["a"][0][0]


def method_of_a_global(model):
    type(HELPER).scaled = lambda self, x: x * 1.5


def value_in_front_of_a_globals_class(model):
    HELPER.gain = 1.5


def code_of_a_function(model):
    type(HELPER).scaled.__code__ = (lambda self, x: x * 1.5).__code__


def method_of_a_member(model):
    type(model.own).scaled = lambda self, x: x * 1.5


def list_in_a_tuple(model):
    model.pair[0][0] = 1.5


def list_in_a_tuple_in_a_dictionary(model):
    model.table["a"][0][0] = 1.5


def method_in_front_of_a_librarys(model):
    type(model.inner).forward = lambda self, x: nn.functional.linear(x, self.weight) * 1.5


ELSEWHERE = [
    method_of_a_global, value_in_front_of_a_globals_class, code_of_a_function, method_of_a_member,
    list_in_a_tuple, list_in_a_tuple_in_a_dictionary, method_in_front_of_a_librarys,
]  # fmt: skip


@pytest.mark.parametrize("steps", [2, 12], ids=["at once", "behind a quiet time"])
@pytest.mark.parametrize("change", ELSEWHERE)
def test_what_is_found_elsewhere_counts(change, steps, monkeypatch):
    scaled = lambda self, x: x * self.gain  # noqa: E731
    copied = type("Copied", (), {"gain": 1.0, "proxy": Proxy(), "scaled": scaled})
    monkeypatch.setitem(globals(), "HELPER", copied())
    part = type("Part", (nn.Linear,), {})
    made = type("Model", (Reading,), {})
    own = type("Own", (Scaled,), {})()
    engine, plain, both = beside(lambda: made(part, own), X)
    both(steps)
    change(plain)
    if change in (list_in_a_tuple, list_in_a_tuple_in_a_dictionary):
        change(engine.model)
    both(3)
    assert engine.stats.compiles == 2
