"""Rows that the data selects, of which every rank has another number."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import LaunchError, RanksDifferError
from stepgraph.runtime.watch import EXIT_CODE
from tests.support import plain_losses

ROWS, WIDTH, STEPS = 32, 6, 12


def selected(net, h):
    return net.experts[1](torch.tanh(net.experts[0](h[h[:, 0] > 0]))).square().sum() / len(h)


def written_back(net, h):
    mask = h[:, 0] > 0
    h = h.clone()
    h[mask] = net.experts[0](h[mask])
    return h.square().mean()


def routed(net, h):
    out = torch.zeros_like(h)
    for number, expert in enumerate(net.experts):
        rows = torch.where(h[:, number] > 0)[0]
        out = out.index_add(0, rows, expert(h[rows]))
    return out.square().mean()


def skipped(net, h):
    """Which parameters a rank reads follows from its rows."""
    out = h
    for number, expert in enumerate(net.experts):
        rows = torch.where(h[:, number] > 0)[0]
        if len(rows) % 2:
            out = out.index_add(0, rows, expert(h[rows]))
    return out.square().mean()


LOSSES = {f.__name__: f for f in (selected, written_back, routed, skipped)}


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.loss = nn.Linear(WIDTH, WIDTH), loss
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return LOSSES[self.loss](self, self.linear(x))


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def plain(loss):
    model = Net(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plain_losses(model, optimizer, ((batch(step),) for step in range(STEPS)))


def trained(loss, plan="zero3"):
    model = Net(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # with one shape a piece of code is compiled eight times before dynamo runs it as Python
    engine = stepgraph.Engine(model, optimizer=optimizer, plan=plan, lowering="eager", max_shapes=1)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses = [engine.step(batch(step).chunk(ranks)[rank]).item() for step in range(STEPS)]
    return losses, engine.notes


def of_a_rank():
    return [
        trained(loss, plan) for loss in LOSSES if loss != "skipped" for plan in ("ddp", "zero3")
    ]


def test_ranks_with_other_numbers_of_rows_train_as_one_process_does():
    found = launch(of_a_rank, ranks=2)[0]
    wanted = [plain(loss) for loss in LOSSES if loss != "skipped" for _ in range(2)]
    for (losses, notes), expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(losses, expected)
        assert any("graph by graph" in note for note in notes)
        assert sum("rows are selected by data" in note for note in notes) == 1


def test_one_process_writes_selected_rows_back():
    losses, notes = trained("written_back")
    torch.testing.assert_close(losses, plain("written_back"))
    assert any("rows are selected by data" in note for note in notes)


def test_a_rank_that_skips_a_parameter_ends_and_does_not_hang():
    with pytest.raises((LaunchError, RanksDifferError)) as raised:
        launch(trained, "skipped", ranks=2)
    # the watch says why on the ranks' stderr, which may be another test's by now
    assert f"exit code {EXIT_CODE}" in str(raised.value) or "do not do the same" in str(
        raised.value
    )
