"""What shares storage with what, of operators that nobody declared."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import stepgraph
from stepgraph.equivalence.check import check_model
from tests.sampling import sampled


@torch.library.custom_op("stepgraph_tests::count_up", mutates_args=("counter",))
def count_up(counter: torch.Tensor) -> None:
    counter.add_(1)


@count_up.register_fake
def _(counter):
    return None


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        count_up(self.seen)
        return (self.linear(x) + self.seen).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_operator_that_writes_its_argument_is_run_as_in_torch():
    torch.manual_seed(0)
    model = Counting()
    plain = copy.deepcopy(model)
    engine = stepgraph.Engine(model, optimizer=sgd(model), plan="ddp", lowering="eager")
    optimizer, batch = sgd(plain), torch.randn(4, 4)
    for _ in range(2):
        loss = plain(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(engine.step(batch), loss.detach())
    for name, expected in plain.state_dict().items():
        value = model.state_dict()[name]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize(("mesh", "plan"), sampled([("dp=2,tp=2", "tp+ddp"), ("dp=2", "zero3")]))
def test_and_on_ranks(mesh, plan):
    model = Counting()
    report = check_model(
        model,
        optimizer=sgd(model),
        batch=torch.randn(4, 4),
        mesh=mesh,
        plan=plan,
        entries=("step",),
    )
    assert report.ok, report
