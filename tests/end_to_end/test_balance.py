"""Forwards and backwards of graphs need not come in pairs: nothing piles up, nothing is compiled twice."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import stepgraph
from tests.sampling import sampled

STEPS, SETTLED = 200, 20


class Model(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 7), nn.Linear(7, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(hidden)


class ChoosesOnly(Model):
    """A region whose input requires grad while its output, an index, does not."""

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        best = hidden.argmax(1)
        torch._dynamo.graph_break()
        return self.second(hidden) * (1 + best[:, None])


class WithoutGrad(Model):
    """A region under no_grad, with a break inside."""

    def forward(self, x):
        hidden = self.first(x).tanh()
        with torch.no_grad():
            scale = hidden.abs().mean()
            torch._dynamo.graph_break()
            scale = scale + 1
        return self.second(hidden) * scale


class Auxiliary(Model):
    """Results beside the one that is used: differentiable, integer, detached."""

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        result = self.second(hidden)
        return result, hidden.exp(), result.argmax(1), result.detach() * 2


class Writes(Model):
    """A region that writes into an input which requires grad; nothing that it returns does."""

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        count = self.double(hidden)
        torch._dynamo.graph_break()
        return self.second(hidden.tanh()) + count

    def double(self, hidden):
        torch._dynamo.graph_break()
        hidden.mul_(2)
        return (hidden.detach() > 0).sum()


class Fails(Model):
    """An exception in the middle, for batches of five rows."""

    def forward(self, x):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        if len(x) == 5:
            raise ArithmeticError("in the middle")
        return self.second(hidden)


def batch_of(step, rows=4):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)


def loss_of(model, batch):
    result = model(batch[0])
    result = result[0] if isinstance(result, tuple) else result
    return (result - batch[1]).square().mean()


def follow(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def learn(model, optimizer, step):
    follow(loss_of(model, batch_of(step)), optimizer)


def skip_some(model, optimizer, step):
    loss = loss_of(model, batch_of(step))
    if step % 3:
        follow(loss, optimizer)


def alternate_with_no_grad(model, optimizer, step):
    with torch.no_grad():
        loss_of(model, batch_of(step))
    learn(model, optimizer, step)


def evaluate_between(model, optimizer, step):
    model.eval()
    with torch.no_grad():
        model(batch_of(step)[0])
    model.train()
    learn(model, optimizer, step)


def two_shapes(model, optimizer, step):
    follow(loss_of(model, batch_of(step, 4 + 2 * (step % 2))), optimizer)


def fail_sometimes(model, optimizer, step):
    if step % 3 == 0:
        with pytest.raises(ArithmeticError, match="in the middle"):
            loss_of(model, batch_of(step, 5))
    learn(model, optimizer, step)


def two_losses(model, optimizer, step):
    one, two = loss_of(model, batch_of(step)), loss_of(model, batch_of(step + 1))
    follow(one + two, optimizer)


def backward_twice(model, optimizer, step):
    loss = loss_of(model, batch_of(step))
    loss.backward(retain_graph=True)
    follow(loss, optimizer)


def both_used(model, optimizer, step):
    result, auxiliary, index, detached = model(batch_of(step)[0])
    assert index.dtype == torch.int64 and not detached.requires_grad
    loss = result.square().mean() + (0.1 * auxiliary.mean() if step % 2 else 0)
    follow(loss, optimizer)


SITUATIONS = {
    "training": (Model, learn),
    "a region without a differentiable output": (ChoosesOnly, learn),
    "a region under no_grad": (WithoutGrad, learn),
    "a backward that is skipped": (Model, skip_some),
    "no_grad between steps": (Model, alternate_with_no_grad),
    "evaluation between steps": (Model, evaluate_between),
    "two shapes": (Model, two_shapes),
    "an exception in the middle": (Fails, fail_sometimes),
    "two losses": (Model, two_losses),
    "a backward twice": (Model, backward_twice),
    "outputs that nobody uses": (Auxiliary, learn),
    "an output that is used sometimes": (Auxiliary, both_used),
    "an input that is written": (Writes, learn),
}


def run(kind, step_once, steps, *, parallel, whole=False, at=lambda step, model: None):
    torch.manual_seed(0)
    model = kind()
    if parallel:
        example = batch_of(0)[:1]
        model = stepgraph.parallelize(
            model, example=example, plan="ddp", lowering="eager", compiled_autograd=whole
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        step_once(model, optimizer, step)
        at(step, model)
    return model


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def check(kind, step_once, *, whole=False):
    seen = {}

    def look(step, model):
        if step in (SETTLED, STEPS - 1):
            stats = model.forward.compiler.stats
            seen[step] = (live_tensors(), stats.compiles, list(stats.recompiles))

    found = run(kind, step_once, STEPS, parallel=True, whole=whole, at=look)
    (tensors, *compiled), (tensors_later, *compiled_later) = seen[SETTLED], seen[STEPS - 1]
    assert tensors_later <= tensors and compiled_later == compiled
    expected = run(kind, step_once, STEPS, parallel=False)
    for (name, wanted), parameter in zip(
        expected.named_parameters(), found.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.to_local(), wanted, msg=name)


@pytest.mark.parametrize("name", sampled(SITUATIONS, every=5))
def test_nothing_piles_up(name):
    check(*SITUATIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(SITUATIONS, every=len(SITUATIONS)))
def test_nothing_piles_up_under_compiled_autograd(name):
    check(*SITUATIONS[name], whole=True)


def test_layers_that_are_frozen_and_unfrozen_recompile_once():
    compiles = []

    def step_once(model, optimizer, step):
        model.second.requires_grad_(not 5 <= step < 10)
        learn(model, optimizer, step)

    def look(step, model):
        compiles.append(model.forward.compiler.stats.compiles)

    found = run(Model, step_once, 20, parallel=True, at=look)
    expected = run(Model, step_once, 20, parallel=False)
    for wanted, parameter in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), wanted)
    assert compiles[4] == compiles[0] and compiles[5] > compiles[4]
    assert compiles[19] == compiles[5]
    assert len(found.forward.compiler.stats.recompiles) == compiles[5] - compiles[4]


def test_two_models_do_not_know_of_each_other():
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Model()
        plain = copy.deepcopy(model)
        made = stepgraph.parallelize(
            model, example=batch_of(0)[:1], plan="ddp" if seed else "zero3", lowering="eager",
            memory="full" if seed else "none",
        )  # fmt: skip
        pair = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (made, plain)]
        models.append(pair)
    compiles = []
    for step in range(30):
        if step == 7:  # an exception in one of them
            with pytest.raises(Exception, match="mat1|size|shape"):
                models[0][0][0](torch.randn(4, 9))
        for pair in models:
            for model, optimizer in pair:
                learn(model, optimizer, step)
        compiles.append([pair[0][0].forward.compiler.stats.compiles for pair in models])
    assert compiles[1] == compiles[6] and compiles[8] == compiles[29]
    for (made, _), (plain, _) in models:
        for found, wanted in zip(made.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.to_local(), wanted)
