"""Numbers that code reads from tensors: kept as tensors where they are numbers, else a graph break."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.equivalence.check import check_model
from stepgraph.errors import GraphBreakError
from tests.sampling import sampled
from tests.support import captured

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self, of):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.of, self.kept = nn.Linear(6, 4), of, 0.0

    def forward(self, x):
        return self.of(self, self.linear(x))


def mean(h):
    return h.square().mean()


def keeping(net, h):
    net.kept = h.detach().abs().max().item()
    return mean(h) / net.kept


def in_a_region(net, h):
    def scaled(h):
        return mean(h * h.detach().abs().max().item())

    return checkpoint(scaled, h, use_reentrant=False)


WHOLE = {
    "item": lambda net, h: mean(h) / h.detach().abs().max().item(),
    "float": lambda net, h: mean(h) * float(h.detach().mean()) + 1 / float(h.detach().abs().sum()),
    "int": lambda net, h: mean(h) * int(h.detach().sum()),
    "numpy": lambda net, h: mean(h) * float(h.detach().numpy().max()),
    "count": lambda net, h: h.square().sum() / max(1, (h > 0).sum().item()),
    "bounded": lambda net, h: mean(h) * min(h.detach().max().item(), 0.4),
    "root": lambda net, h: mean(h) * math.sqrt(h.detach().abs().max().item()),
    "annealed": lambda net, h: mean(h) * (0.9 * 1.5 + 0.1 * h.detach().mean().item()),
    "clamped": lambda net, h: mean(h.clamp(max=h.detach().mean().item())),
    "of a small type": lambda net, h: mean((h.bfloat16() * h.detach().max().item()).float()),
    "of another type": lambda net, h: mean(h.double()) * h.detach().max().item(),
    "in a region": in_a_region,
    "of bytes": lambda net, h: mean(h) * (((h * 0 + 200).to(torch.uint8).max().item() + 100) / 256),
    "of half": lambda net, h: mean(h) * (((h * 0 + 300).half().max().item() ** 2) / 2**16),
    "of truth": lambda net, h: mean(h) * (1 + float(h.detach().sum() > 0)) * (h.sum() > -99).item(),
    "twice": lambda net, h: mean((h.bfloat16() * h.max().item() * h.min().item()).float()),
    "to a power": lambda net, h: mean(h) * (h > -99).sum().item() ** -1,
    "checked only": lambda net, h: mean(h) + 0 * torch.ones(1).sum().item(),
}
BROKEN = {
    "size": lambda net, h: mean(h[:, : int((h[0] > 0).sum()) + 1]),
    "unique": lambda net, h: mean(h) * (h * 10).long().unique().numel(),
    "branch": lambda net, h: mean(h) if h.sum().item() > 0 else h.sum(),
    "filled": lambda net, h: mean(h) + torch.full((4,), h.detach().max().item()).mean(),
    "two bounds": lambda net, h: mean(h.clamp(0.1, h.detach().mean().item())),
    "dropout": lambda net, h: mean(F.dropout(h, h.detach().abs().max().item() / 10)),
    "rounded": lambda net, h: mean(h) * round(h.detach().max().item(), 1),
    "in place, small": lambda net, h: mean(h.bfloat16().mul_(h.detach().max().item()).float()),
    "kept": keeping,
}


@pytest.mark.parametrize("name", sampled(WHOLE, every=3))
def test_it_is_that_of_the_global_batch(name):
    model = Net(WHOLE[name])
    expected = model(X)
    expected.backward()
    wanted = model.linear.weight.grad.clone()
    model.zero_grad()
    report = check_model(model, batch=X, mesh="dp=2", plan="zero3")
    assert report.ok, str(report)
    engine = stepgraph.Engine(model, plan="ddp", lowering="eager", strict=True)
    torch.testing.assert_close(engine.step(X), expected.detach(), check_dtype=False)
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), wanted)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_number_breaks_and_names_its_line(name):
    with pytest.raises(GraphBreakError) as raised:
        captured(Net(BROKEN[name]), X)
    assert "test_read_numbers.py" in str(raised.value) or "model.kept" in str(raised.value)


@pytest.mark.parametrize("name", ["branch", "kept", "filled"])
def test_graph_by_graph_in_one_process_it_is_what_python_reads(name):
    model = Net(BROKEN[name])
    expected, kept = model(X).detach(), model.kept
    model.kept = 0.0
    engine = stepgraph.Engine(model, plan="ddp", lowering="eager")
    torch.testing.assert_close(engine.step(X), expected)
    assert model.kept == kept


def test_a_number_that_is_returned_is_a_number():
    model = Net(lambda net, h: {"loss": mean(h), "share": (h > 0).float().mean().item()})
    expected = model(X)
    engine = stepgraph.Engine(
        model, loss=lambda m, b: m(b), plan="ddp", lowering="eager", strict=True
    )
    found = engine.evaluate(X)
    assert type(found["share"]) is float and found["share"] == pytest.approx(expected["share"])


def on_a_rank(name):
    rank = torch.distributed.get_rank()
    model = Net((WHOLE | BROKEN)[name])
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lowering="eager"
    )
    return [float(engine.step(X[4 * rank : 4 * rank + 4])) for _ in range(2)], engine.notes


def test_on_real_ranks_it_is_that_of_all_or_said_to_be_each_ones_own():
    model = Net(WHOLE["item"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(X)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for losses, notes in launch(on_a_rank, "item", ranks=2):
        assert losses == pytest.approx(wanted, rel=1e-5) and not notes
    for _, notes in launch(on_a_rank, "filled", ranks=2):
        assert any(note.startswith("loss: the mean over data-parallel ranks") for note in notes)
