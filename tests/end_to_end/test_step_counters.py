"""Parameters of one group that are not updated together at every step: each counts its own, as in torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stepgraph
from tests.sampling import sampled

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


class Pair:
    """The same training by stepgraph and by plain torch."""

    def __init__(self, optimizer):
        self.plain = make_model()
        self.plain_optimizer = OPTIMIZERS[optimizer](self.plain.parameters())
        model = copy.deepcopy(self.plain)
        self.optimizer = OPTIMIZERS[optimizer](model.parameters())
        self.engine = stepgraph.Engine(
            model, loss=loss, optimizer=self.optimizer, plan="ddp", lowering="eager"
        )

    def check(self):
        for (name, expected), found in zip(
            self.plain.named_parameters(), self.engine.model.parameters(), strict=True
        ):
            torch.testing.assert_close(found.to_local(), expected, msg=name)


@pytest.mark.parametrize("optimizer", sampled(OPTIMIZERS))
def test_layers_that_are_frozen_for_a_while(optimizer):
    pair = Pair(optimizer)
    for step, learned in enumerate([(0, 2, 4), (4,), (2, 4), (0, 2, 4), (4,), (0, 2, 4)]):
        for model in (pair.plain, pair.engine.model):
            for index in (0, 2, 4):
                model[index].requires_grad_(index in learned)
        pair.plain_optimizer.zero_grad(set_to_none=True)
        loss(pair.plain, batch_of(step)).backward()
        pair.plain_optimizer.step()
        pair.engine.step(batch_of(step))
        pair.check()


@pytest.mark.parametrize("optimizer", sampled(OPTIMIZERS))
def test_gradients_that_are_none_at_some_steps(optimizer):
    pair = Pair(optimizer)
    for step, without in enumerate([(), (0,), (), (0, 2), (4,), (0,), ()]):
        pair.plain_optimizer.zero_grad(set_to_none=True)
        loss(pair.plain, batch_of(step)).backward()
        engine = pair.engine
        engine.backward(engine(batch_of(step)))
        for model in (pair.plain, engine.model):
            for index in without:
                model[index].weight.grad = None
        pair.plain_optimizer.step()
        engine.optimizer_step()
        pair.check()


def test_what_is_compiled_settles():
    pair = Pair("adamw")
    engine, compiles = pair.engine, []
    for step in range(8):
        engine.backward(engine(batch_of(step)))
        if step % 2:
            engine.model[0].weight.grad = None
        engine.optimizer_step()
        compiles.append(engine.stats.compiles)
    assert compiles == [2, 3, 4, 4, 4, 4, 4, 4]
    assert any("no longer are" in reason for reason in engine.stats.recompiles)


def test_counters_that_differ_can_be_loaded_after_a_step():
    pair = Pair("adamw")
    for step in range(3):
        pair.plain_optimizer.zero_grad(set_to_none=True)
        loss(pair.plain, batch_of(step)).backward()
        if step:
            pair.plain[2].weight.grad = None
        pair.plain_optimizer.step()
    pair.engine.step(batch_of(0))
    pair.engine.load_state_dict(pair.plain.state_dict())
    pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    pair.plain_optimizer.zero_grad(set_to_none=True)
    loss(pair.plain, batch_of(3)).backward()
    pair.plain_optimizer.step()
    pair.engine.step(batch_of(3))
    pair.check()
    saved = pair.optimizer.state_dict()["state"]
    assert sorted({float(table["step"]) for table in saved.values()}) == [2, 4]
