"""NumPy's arrays and numbers in model code, and ``.data`` that a forward assigns: right, or said."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import CaptureError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
FACTORS = np.linspace(0.5, 1.5, 6, dtype=np.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 1)
        self.scale, self.times = np.sqrt(64), np.int64(2)
        self.array = FACTORS
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        for _ in range(self.times):
            x = x.cos()
        return (self.inner(x) / self.scale * np.float32(0.1)).square().mean()


def engine_of(model, loss=lambda m, x: m(x)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepgraph.Engine(model, loss=loss, optimizer=optimizer, plan="ddp", lowering="eager")


def test_numpys_numbers_are_read_as_pythons_and_compared_at_every_step():
    plain, model = Net(), Net()
    engine, optimizer = engine_of(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for scale in (8, 8, 2, 8):
        plain.scale = model.scale = np.float64(scale)
        optimizer.zero_grad()
        loss = plain(X)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(engine.step(X), loss.detach())
    assert engine.stats.compiles == 2
    assert "model.scale" in engine.stats.recompiles[0]


def of_a_closure():
    held = FACTORS.copy()
    return lambda m, x: m.inner(x * torch.from_numpy(held)).mean()


LOSSES = {
    "model.array": lambda m, x: m.inner(x * torch.from_numpy(m.array)).mean(),
    "FACTORS": lambda m, x: m.inner(x * torch.as_tensor(FACTORS * 2)).mean(),
    "__closure__": of_a_closure(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_array_is_an_error_that_says_where_and_what_to_do(name):
    with pytest.raises(CaptureError, match=f"reads the NumPy array .*{name}") as raised:
        engine_of(Net(), LOSSES[name]).step(X)
    assert "test_numpy_and_data.py" in raised.value.where and "m.inner" in raised.value.where
    assert "torch.from_numpy(array), called once" in raised.value.do
    with pytest.raises(CaptureError, match="reads the NumPy array"):
        stepgraph.plan(Net(), example=X, loss=LOSSES[name], mesh="dp=2")


def test_what_the_error_says_works_and_has_the_arrays_memory():
    held = FACTORS.copy()
    tensor = torch.from_numpy(held)
    engine = engine_of(Net(), lambda m, x: m.inner(x * tensor).mean())
    before = engine.evaluate(X)
    held *= 2
    bias = engine.model.inner.bias.full_tensor()
    torch.testing.assert_close(engine.evaluate(X) - bias[0], 2 * (before - bias[0]))
    assert engine.stats.compiles == 1


class Assigning(Net):
    def __init__(self, what, whole):
        super().__init__()
        self.what, self.whole = what, whole

    def forward(self, x):
        if not self.whole:
            torch._dynamo.graph_break()
        if self.what == "buffer":
            self.mean.data = 0.9 * self.mean.data + x.mean(0)
        elif self.what == "no grad":
            with torch.no_grad():
                self.mean.data = x.mean(0)
        else:
            self.inner.weight.data = self.inner.weight.data * 0.5
        return (self.inner(x) + self.mean.sum()).mean()


@pytest.mark.parametrize(
    ("what", "whole"),
    [
        ("buffer", True),
        ("no grad", True),
        ("parameter", True),
        ("buffer", False),
        ("no grad", False),
        ("parameter", False),
    ],
)
def test_data_that_a_forward_assigns_is_an_error_that_says_where_and_what_to_do(what, whole):
    with pytest.raises(CaptureError, match=re.escape("assigns to the .data")) as raised:
        engine_of(Assigning(what, whole)).step(X)
    assert re.search(r"test_numpy_and_data\.py:\d+ in ", raised.value.where)
    assert "copy_" in raised.value.do
