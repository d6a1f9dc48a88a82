"""Results of one of dynamo's graphs that show a tensor which is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.torch_internals.bases import return_bases


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


WAYS = ["slices", "chunks", "overlap", "expanded", "alone", "twice"]


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


@pytest.mark.parametrize(
    ("how", "added"), [("slices", 1), ("overlap", 1), ("expanded", 1), ("alone", 0), ("twice", 0)]
)
def test_only_what_several_results_show_is_returned_too(how, added):
    graphs = []

    def noted(graph, examples):
        before = len(graph.graph.output_node().args[0])
        graphs.append((return_bases(graph), before, len(graph.graph.output_node().args[0])))
        return lambda *inputs: graph.forward(*inputs)[:before]

    model = Broken(how)
    torch.compile(model, backend=noted)(torch.randn(4, 8))
    torch._dynamo.reset()
    first, *rest = graphs
    assert first[0] == added and first[2] == first[1] + added
    assert all(one[0] == 0 for one in rest)
