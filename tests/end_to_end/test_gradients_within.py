"""Gradients inside the loss, and gradients of them: penalties, forces, equations, adversarial inputs."""

import copy

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.equivalence.check import check_model
from stepgraph.errors import CaptureError
from tests.sampling import sampled

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def net(broken=False):
    torch.manual_seed(0)
    middle = Break() if broken else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), middle, nn.Linear(16, 1))


class Break(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x * 1.0


def penalty(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean() + out.square().mean()


def forces(model, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        energy = model(x).squeeze(-1)
        force = -torch.autograd.grad(
            energy, x, grad_outputs=torch.ones_like(energy), create_graph=True, retain_graph=True
        )[0]
        return (force - 0.1).square().mean() + (energy - 1).square().mean()


def equation(model, x):
    x = x.clone().requires_grad_()
    u = model(x)
    ux = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    uxx = torch.autograd.grad(ux.sum(), x, create_graph=True)[0]
    return (uxx.sum(1) + u.squeeze()).square().mean()


def of_parameters(model, x):
    out = model(x).square().mean()
    gradients = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
    return out + sum(g.square().sum() for g in gradients)


def adversarial(model, x):
    own = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(own).sum(), own)
    return model(x + 0.1 * gradient.sign()).square().mean()


LOSSES = [penalty, forces, equation, of_parameters, adversarial]


@pytest.mark.parametrize(
    ("mesh", "plan", "loss"),
    sampled(
        [(*on, loss) for on in (("dp=2", "zero3"), ("dp=2,tp=2", "tp+zero1")) for loss in LOSSES]
    ),
)
def test_every_pass_and_rank_computes_them(loss, mesh, plan):
    report = check_model(
        net(), batch=X, loss=loss, mesh=mesh, plan=plan, entries=("step", "gradients")
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("loss", LOSSES)
def test_training_is_that_of_plain_pytorch(loss):
    own = net()
    twin = copy.deepcopy(own)
    engine = stepgraph.Engine(
        own, loss=loss, optimizer=torch.optim.SGD(own.parameters(), lr=0.1), plan="ddp",
        lowering="eager", strict=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = loss(twin, X)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(engine.step(X), expected.detach())


def test_an_evaluation_says_what_it_needs_and_training_goes_on():
    own = net()
    engine = stepgraph.Engine(own, loss=penalty, plan="ddp", lowering="eager", strict=True)
    engine.step(X)
    with pytest.raises(CaptureError, match="enable_grad"):
        engine.evaluate(X)
    engine.step(X)
    other = stepgraph.Engine(net(), loss=forces, plan="ddp", lowering="eager", strict=True)
    torch.testing.assert_close(other.evaluate(X), forces(net(), X).detach())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_function_of_the_users_own_is_not_differentiated_twice():
    def loss(model, x):
        out = Square.apply(model(x)).mean()
        (gradient,) = torch.autograd.grad(out, model[0].weight, create_graph=True)
        return out + gradient.square().sum()

    engine = stepgraph.Engine(net(), loss=loss, plan="ddp", lowering="eager")
    with pytest.raises(CaptureError, match="Function is differentiated twice"):
        engine.step(X)


def test_graph_by_graph_a_gradient_of_a_gradient_is_a_clear_error():
    engine = stepgraph.Engine(net(True), loss=penalty, plan="ddp", lowering="eager")
    with pytest.raises(CaptureError, match="gradient of a gradient"):
        engine.step(X)
    with pytest.raises(CaptureError, match="gradient of a gradient"):
        engine.backward(engine(X))
