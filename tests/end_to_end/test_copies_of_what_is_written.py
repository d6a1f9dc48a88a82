"""Under inductor a copy of a value that the step overwrites is that of before, as in plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

STEPS = 3
# What has the value of a buffer of eight numbers, in memory of its own.
COPIES = {
    "clone": lambda x: x.clone(),
    "cat": lambda x: torch.cat([x]),
    "parts": lambda x: torch.cat(x.split([3, 5])),
    "of a view": lambda x: x.view(2, 4).clone().view(8),
    "another type and back": lambda x: x.double().float(),
    "the same type": lambda x: x.to(x.dtype, copy=True),
    "padded": lambda x: F.pad(x, (0, 0)),
    "repeated": lambda x: x.repeat(1),
    "zero more": lambda x: x + 0,
    "zeros more": lambda x: x + torch.zeros(8),
    "one times": lambda x: x * 1,
    "ones times": lambda x: x * torch.ones(8),
    "power": lambda x: x**1,
    "turned twice": lambda x: x.flip(0).flip(0),
    "twice negative": lambda x: torch.neg(torch.neg(x)),
    "rows of a table": lambda x: x[torch.arange(8)],
}


class Old(nn.Module):
    """Reads what a buffer had after it was written."""

    def __init__(self, copies):
        super().__init__()
        self.copies = copies
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in copies)
        for number, _ in enumerate(copies):
            self.register_buffer(f"buffer{number}", torch.randn(8))

    def forward(self, x):
        found = 0.0
        for number, (make, layer) in enumerate(zip(self.copies, self.layers, strict=True)):
            buffer = getattr(self, f"buffer{number}")
            old = make(buffer)
            buffer.copy_(x.mean(0) * (1 + number))
            found = found + layer(x) * old
        return found


class Swapped(nn.Module):
    """Two buffers exchange their values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("now", torch.randn(8))
        self.register_buffer("then", torch.randn(8))

    def forward(self, x):
        kept = self.then.clone()
        self.then.copy_(self.now)
        self.now.copy_(kept)
        return self.layer(x) * self.now + kept


class Running(nn.Module):
    """Blocks that read a mean of activations before they write it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for number in range(4):
            self.register_buffer(f"mean{number}", torch.ones(8))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            mean = getattr(self, f"mean{number}")
            old = mean.clone()
            mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x + torch.tanh(layer(x * old))
        return x


class Looking(torch.optim.Optimizer):
    """Steps along what the parameter has moved, too: it keeps the value of before."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["before"] = torch.zeros_like(p)
                old = p.clone()
                p.add_(p.grad, alpha=-0.1)
                p.add_(p - state["before"], alpha=0.01)
                state["before"].copy_(old)


def assert_trains_alike(model, make_optimizer=None, **settings):
    make_optimizer = make_optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    plain = copy.deepcopy(model)
    theirs, ours = make_optimizer(plain), make_optimizer(model)

    def loss(m, batch):
        return F.mse_loss(m(batch["x"]), batch["y"])

    engine = stepgraph.Engine(model, loss=loss, optimizer=ours, lowering="inductor", **settings)
    for _ in range(STEPS):
        batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
        theirs.zero_grad()
        expected = loss(plain, batch)
        expected.backward()
        theirs.step()
        assert engine.step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, found), one in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            found.full_tensor(), one, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    for found, one in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, one)


def test_copies_of_a_buffer():
    """All in one model: which is wrong is seen by its layer's number."""
    torch.manual_seed(0)
    assert_trains_alike(Old(list(COPIES.values())))


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_buffer(name):
    torch.manual_seed(0)
    assert_trains_alike(Old([COPIES[name]]))


@pytest.mark.slow
def test_buffers_that_are_swapped():
    torch.manual_seed(0)
    assert_trains_alike(Swapped())


@pytest.mark.parametrize("memory", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_blocks_that_are_computed_again(memory):
    torch.manual_seed(0)
    assert_trains_alike(Running(), memory=memory)


@pytest.mark.slow
def test_an_optimizer_that_keeps_old_parameters():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    assert_trains_alike(nn.Sequential(*layers), lambda m: Looking(m.parameters()))
