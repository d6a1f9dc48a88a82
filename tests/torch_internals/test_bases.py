"""Results of a graph that are views: of what is none, and of what has a gradient where they have none."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch


class Broken(nn.Module):
    """A graph break behind two values that are made of one in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.last, self.how = nn.Linear(8, 4), nn.Linear(2, 2), how

    def forward(self, x):
        h = self.layer(x)
        match self.how:
            case "slices":
                one, other = h[:, :2], h[:, 2:]
            case "chunks":
                one, other = h.chunk(2, dim=-1)
            case "overlap":
                one, other = h[:, :2], h[:, 1:3]
            case "expanded":
                mean = h.mean(0)
                one, other = mean.view(2, 2), mean.expand(x.shape[0], 4)[:, :2]
            case "alone":
                one, other = h[:, :2], h[:, 2:] * 2
            case "no_gradient":
                with torch.no_grad():
                    one = h[:, :2]
                other = h
            case "neither":
                with torch.no_grad():
                    one, other = h[:, :2], h[:, 2:]
            case "some":
                with torch.no_grad():
                    one = h[:, :2]
                other = h[:, 2:]
            case "decorated":
                one, other = without_gradient(h), h[:, 1:]
            case "detached":
                one, other = h[:, :2].detach(), h[:, 1:]
            case "twice":
                one = other = h[:, :2]
        torch._dynamo.graph_break()
        return self.last(one).sum() + other.square().sum()


class Written(Broken):
    """What is written to one of them between graphs is seen in the other."""

    def forward(self, x):
        h = self.layer(x)
        one, other = h[:, :2], h[:, 1:3]
        torch._dynamo.graph_break()
        one.mul_(2.0)
        torch._dynamo.graph_break()
        return self.last(one).sum() + other.square().sum()


@torch.no_grad()
def without_gradient(h):
    return h[:, :2]


WAYS = ["slices", "chunks", "overlap", "expanded", "alone", "twice", "no_gradient", "neither"]
WAYS += ["some", "decorated", "detached"]


def steps(model, step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return [step(model, optimizer) for _ in range(2)]


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
@pytest.mark.parametrize("build", [*WAYS, Written])
def test_graph_by_graph_it_trains_as_in_plain_pytorch(build, plan):
    torch.manual_seed(0)
    model = Broken(build) if isinstance(build, str) else build("")
    plain, x = copy.deepcopy(model), torch.randn(4, 8)

    def in_pytorch(model, optimizer):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = stepgraph.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        mesh="dp=1",
        plan=plan,
        lowering="eager",
    )
    losses = [engine.step(x).item() for _ in range(2)]
    assert losses == pytest.approx(steps(plain, in_pytorch), rel=1e-6)
    assert engine.graph_by_graph() is not None
    for name, value in plain.named_parameters():
        trained = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(trained, value.detach(), msg=lambda m, n=name: f"{n}: {m}")


def test_two_ranks_train_as_one_does():
    for how, (losses, expected) in launch(
        of_two_ranks, ["slices", "overlap", "chunks", "some"], ranks=2
    )[0].items():
        assert losses == pytest.approx(expected, rel=1e-5), how


def of_two_ranks(ways):
    """Losses of two ranks, each with half of the rows, and of plain PyTorch on all of them."""
    found = {}
    for how in ways:
        torch.manual_seed(0)
        model, x = Broken(how), torch.randn(4, 8)
        plain = copy.deepcopy(model)
        engine = stepgraph.Engine(
            model,
            loss=lambda model, batch: model(batch) / len(batch),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            mesh="dp=2",
            plan="zero3",
            lowering="eager",
        )
        mine = x.chunk(2)[int(os.environ["RANK"])]
        losses = [engine.step(mine).item() for _ in range(3)]
        assert engine.graph_by_graph() is not None
        optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.01), []
        for _ in losses:
            optimizer.zero_grad()
            loss = plain(x) / len(x)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        found[how] = losses, expected
    return found
