"""Which tensors code may read from outside model and batch, and under which names."""

import functools
from types import SimpleNamespace

import torch
from torch import nn

from stepgraph.capture.outside_tensors import outside_tensors

WEIGHT = torch.ones(3)
CRITERION = nn.CrossEntropyLoss(weight=WEIGHT.clone())
TABLES = {"margins": [torch.zeros(2), 1.0]}


def by_global(model, batch):
    return CRITERION(model(batch), helper(batch))


def helper(batch):
    return batch * WEIGHT + TABLES["margins"][0]


class Loss:
    def __init__(self):
        self.scale = torch.tensor(2.0)
        self.settings = SimpleNamespace(shift=torch.tensor(1.0))

    def __call__(self, model, batch):
        return (model(batch) * self.scale + self.settings.shift).mean()

    def method(self, model, batch):
        return self(model, batch)


def names(loss, model=None):
    return [one.name for one in outside_tensors(loss, model or nn.Linear(3, 3))]


def test_globals_of_the_callable_and_of_what_it_calls():
    assert names(by_global) == ["CRITERION.weight", "TABLES.margins.0", "WEIGHT"]


def test_what_is_closed_over_bound_or_partly_applied():
    weight = torch.ones(3)
    assert names(lambda model, batch: (model(batch) * weight).mean()) == ["weight"]
    assert names(Loss()) == ["Loss.scale", "Loss.settings.shift"]
    assert names(Loss().method) == ["self.scale", "self.settings.shift"]
    assert names(functools.partial(by_global, extra=weight))[-1] == "extra"


def test_attributes_of_modules_that_are_not_registered():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].anchors, model.levels = torch.ones(2), [torch.ones(1), torch.ones(1)]
    model.same = model[0].weight
    assert names(len, model) == ["levels.0", "levels.1", "1.anchors"]


def test_the_models_own_are_not_among_them_however_they_are_reached():
    model = nn.Linear(3, 3)
    assert names(lambda _, batch: model(batch).mean(), model) == []
    alias = model.weight
    assert names(lambda m, batch: (m(batch) * alias).mean(), model) == []


def test_one_name_for_one_tensor_and_another_for_another():
    first = torch.ones(1)
    alias = first
    assert names(lambda m, b: first + alias) == ["alias"]
    loss = functools.partial(lambda first, m, b: first, [torch.ones(1)], first=torch.ones(1))
    assert len(set(names(loss))) == 2


def test_what_is_there_now_is_what_a_program_takes():
    weight = torch.ones(3)

    def loss(model, batch):
        return weight

    (one,) = outside_tensors(loss, nn.Linear(3, 3))
    assert one.now is weight
    weight = torch.zeros(3)
    assert one.now is weight


class ByGlobal(nn.Module):
    def forward(self, x):
        return x * WEIGHT


def test_what_the_code_of_a_module_names():
    assert names(len, nn.Sequential(ByGlobal(), ByGlobal())) == ["WEIGHT"]


def test_rings_end():
    ring = []
    ring += [ring, torch.ones(1)]
    model = nn.Linear(3, 3)
    model.__dict__["parent"] = SimpleNamespace(child=model)
    assert names(lambda m, b: ring, model) == ["ring.1"]
