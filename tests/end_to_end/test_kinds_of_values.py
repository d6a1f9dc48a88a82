"""Whatever kind of Python object a model reads, another one in its place counts from the next step on."""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from tests.beside import beside

it: Any = None
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Reading(nn.Module):
    """Reads attributes, and what is found by a global name; ``it`` is made anew for each test."""

    def __init__(self):
        super().__init__()
        self.inner, self.act, self.acts = nn.Linear(6, 1), torch.tanh, [torch.tanh]
        self.module, self.scale, self.made = nn.functional, 1.0, defaultdict(lambda: 1.0)

    def forward(self, x):
        h = self.module.softplus(self.acts[0](self.act(it.gain(self.inner(x)))))
        h = it.act(h) * (2.0 if "key" in it.table else 1.0) * (2.0 if hasattr(it, "flag") else 1.0)
        h = h * getattr(it, "rate", 1.0) * self.scale * self.made["any"]
        return h.square().mean()


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """What is found by a global name: a class."""

    class It:
        act, table = staticmethod(torch.tanh), {}

        @classmethod
        def gain(cls, x):
            return x * 2

    monkeypatch.setitem(globals(), "it", It)
    return It


class Tripled(nn.Linear):
    """In another one's place."""

    def forward(self, x):
        return super().forward(x) * 3


def factory(model):
    model.made.default_factory = lambda: 3.0
    model.made.clear()


OF_MODELS = {
    "function of torch": lambda model: setattr(model, "act", torch.sigmoid),
    "function of torch in a list": lambda model: model.acts.__setitem__(0, torch.sigmoid),
    "module": lambda model: setattr(model, "module", types.SimpleNamespace(softplus=torch.relu)),
    "class of a part": lambda model: setattr(model.inner, "__class__", Tripled),
    "what makes items": factory,
}
OF_CLASSES = {
    "function of torch by a global name": lambda cls, it: setattr(it, "act", torch.sigmoid),
    "method of a class": lambda cls, it: setattr(it, "gain", classmethod(lambda cls, x: x * 5)),
    "key": lambda cls, it: it.table.update(key=1),
    "attribute that was not there": lambda cls, it: setattr(it, "flag", True),
    "attribute in place of a default": lambda cls, it: setattr(it, "rate", 3.0),
    "property in front of an attribute": lambda cls, it: setattr(cls, "scale", property(lambda _: 5.0)),
    "another way to look up": lambda cls, it: setattr(
        cls, "__getattr__", lambda self, name: nn.Module.__getattr__(self, name)
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", [2, 12], ids=["at once", "behind a quiet time"])
@pytest.mark.parametrize("what", OF_MODELS)
def test_what_a_model_holds(what, steps):
    engine, plain, both = beside(Reading, X)
    both(steps)
    assert engine.stats.compiles == 1
    for model in (plain, engine.model):
        OF_MODELS[what](model)
    both(4)
    assert engine.stats.compiles == 2


@pytest.mark.parametrize("steps", [2, 12], ids=["at once", "behind a quiet time"])
@pytest.mark.parametrize("what", OF_CLASSES)
def test_what_is_found_by_a_global_name_or_of_a_class(what, steps, found):
    made = type("Model", (Reading,), {})
    engine, _, both = beside(made, X)
    both(steps)
    assert engine.stats.compiles == 1
    OF_CLASSES[what](made, found)
    both(4)
    same = what == "another way to look up"
    assert engine.stats.compiles == (1 if same else 2)


def test_another_function_by_a_global_name(monkeypatch, found):
    engine, _, both = beside(Reading, X)
    both(12)
    monkeypatch.setitem(globals(), "it", type("Other", (found,), {"act": staticmethod(torch.relu)}))
    both(4)
    assert engine.stats.compiles == 2
