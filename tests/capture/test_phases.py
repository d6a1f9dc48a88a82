"""Every operation of a custom function's backward is in the backward."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.equivalence.check import check_model
from stepgraph.program.program import BACKWARD, FORWARD, PHASES

aten = torch.ops.aten
# Dynamo makes one for every custom function that it traces (seen in torch 2.13).
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning"
)


class Scale(torch.autograd.Function):
    """Its backward computes from what it saved as well as from the gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        x, factor = ctx.saved_tensors
        return (gradient * factor).clamp(-1e3, 1e3) + 0.0 * x.cos(), None


class Last(torch.autograd.Function):
    """A loss: nothing stands between it and where the backward starts."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x / x.numel()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("factor", torch.full((8,), 1.5))

    def forward(self, x):
        return self.second(Scale.apply(self.first(x).tanh(), self.factor))


def loss(model, batch):
    return Last.apply(model(batch))


def engine_and_model(**options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = stepgraph.Engine(model, loss=loss, optimizer=optimizer, lowering="eager", **options)
    torch.manual_seed(0)
    return made, Net()


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def plain_step(model):
    value = loss(model, batch())
    value.backward()
    return value.item(), {n: p - 0.1 * p.grad for n, p in model.named_parameters()}


def test_what_a_custom_backward_computes_is_backward():
    engine, _ = engine_and_model(schedule="none")  # which would let updates begin in the backward
    engine.step(batch())
    step = engine.programs["step"]
    phases = {node.target: node.meta["phase"] for node in step.operations()}
    for late in (aten.clamp.default, aten.cos.default):  # from the gradient; from what was saved
        assert phases[late] == BACKWARD
    assert phases[aten.tanh.default] == FORWARD
    order = [PHASES.index(node.meta["phase"]) for node in step.operations()]
    assert order == sorted(order)


@pytest.mark.parametrize("memory", [None, "full"])
def test_it_trains_in_steps_and_split(memory):
    wanted = plain_step(engine_and_model()[1])
    for split in (False, True):
        engine, _ = engine_and_model(memory=memory)
        if split:
            value = engine(batch())
            engine.backward(value)
            engine.optimizer_step()
        else:
            value = engine.step(batch())
        assert value.item() == pytest.approx(wanted[0], rel=1e-6)
        for name, parameter in engine.state_dict().items():
            if name in wanted[1]:
                torch.testing.assert_close(parameter.full_tensor(), wanted[1][name].detach())


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_every_pass_keeps_it(plan):
    _, model = engine_and_model()
    report = check_model(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batch=batch(),
        mesh="dp=2",
        plan=plan,
        memory="full",
    )
    assert report.ok, str(report)
