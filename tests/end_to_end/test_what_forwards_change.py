"""What a forward changes in Python is changed, and counts at the next step, whatever holds it."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import CaptureError
from tests.beside import beside

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@dataclass
class Made:
    """An object that a forward makes."""

    calls: int = 0


class Changing(nn.Module):
    """Computes with what it keeps, and changes that first."""

    def __init__(self, kept, change):
        super().__init__()
        self.inner, self.kept, self.change = nn.Linear(6, 1), kept(), change

    def forward(self, x):
        return self.inner(x).square().mean() * self.change(self)


def counts(model):
    model.kept["calls"] += 1
    return model.kept["calls"]


def gets(model):
    model.kept["calls"] = model.kept.get("calls", 0) + 1
    return model.kept["calls"]


def appends(model):
    model.kept.append(1)
    return len(model.kept)


def adds(model):
    model.kept.add(len(model.kept))
    return len(model.kept)


def grows_inside(model):
    model.kept.setdefault("all", []).append(1)
    return len(model.kept["all"])


def makes(model):
    model.kept = Made(model.kept.calls + 1)
    return model.kept.calls


def tries(model):
    try:
        return model.made
    except AttributeError:
        model.made = 3.0
        return 1.0


def takes_next(model):
    return next(model.kept) + 1


CHANGES = {
    "defaultdict": (lambda: defaultdict(int), counts),
    "Counter": (Counter, counts),
    "OrderedDict": (OrderedDict, gets),
    "dict": (dict, gets),
    "dict of lists": (dict, grows_inside),
    "list": (list, appends),
    "deque": (deque, appends),
    "set": (set, adds),
    "object": (Made, makes),
    "attribute that is tried": (int, tries),
    "count": (itertools.count, takes_next),
    "iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0]), takes_next),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_kept_is_changed_at_every_step(what):
    kept, change = CHANGES[what]
    engine, plain, both = beside(lambda: Changing(kept, change), X)
    both(4)
    if "iter" not in what and what != "count":
        assert engine.model.kept == plain.kept and type(engine.model.kept) is type(plain.kept)


def test_items_that_a_default_makes_are_there():
    def reads(model):
        return 1.0 + len(model.kept["any"])

    engine, plain, both = beside(lambda: Changing(lambda: defaultdict(list), reads), X)
    both(3)
    assert engine.model.kept == plain.kept == {"any": []}
    assert engine.stats.compiles == 1


@pytest.mark.parametrize(
    ("kept", "change", "says"),
    [
        (lambda: random.Random(0), lambda model: model.kept.random(), "random.Random"),
        (lambda: deque([1], maxlen=2), appends, "deque that holds at most 2"),
    ],
)
def test_what_torch_traces_wrongly_is_a_clear_error(kept, change, says):
    model = Changing(kept, change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = stepgraph.Engine(model, optimizer=optimizer, loss=lambda m, x: m(x), lowering="eager")
    with pytest.raises(CaptureError, match=says):
        engine.step(X)
