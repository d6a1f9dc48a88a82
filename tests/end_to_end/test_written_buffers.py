"""Buffers that the forward changes in place or puts others in place of: in regions, on several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.cli.launcher import launch
from tests.sampling import sampled
from tests.support import plain_losses

ROWS, WIDTH, STEPS = 8, 6, 3


def in_place(block, y):
    block.count += 1
    block.mean.lerp_(y.detach().mean(0), 0.1)


def assigned(block, y):
    block.count = block.count + 1
    block.mean = 0.9 * block.mean + 0.1 * y.detach().mean(0)


def assigned_beside_in_place(block, y):
    block.count = block.count + 1
    with torch.no_grad():
        block.mean.mul_(0.9).add_(0.1 * y.mean(0))


def never_read(block, y):
    block.last = y.detach().mean(0)


WRITES = {f.__name__: f for f in (in_place, assigned, assigned_beside_in_place, never_read)}


class Block(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, WIDTH), write
        self.register_buffer("count", torch.zeros((), dtype=torch.float32))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        before = self.mean
        if self.training:
            WRITES[self.write](self, y)
        return (y - self.mean - 0.5 * before) * (1 + 0.1 * self.count)


class Net(nn.Module):
    def __init__(self, write, how=None, broken=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Block(write)
        self.how, self.broken = how, broken

    def forward(self, x, y):
        if self.broken:
            torch._dynamo.graph_break()
        x = self.first(x)
        plain = self.how is None
        x = self.block(x) if plain else checkpoint(self.block, x, use_reentrant=self.how)
        return (x - y).square().mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))


def plain(write):
    """Plain PyTorch, without regions."""
    model = Net(write)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = plain_losses(model, optimizer, map(batch, range(STEPS)))
    return losses, dict(model.named_buffers())


def trained(write, how, broken=False):
    model = Net(write, how, broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="ddp", lowering="eager")
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses = [
        engine.step(tuple(x.chunk(ranks)[rank] for x in batch(step))).item()
        for step in range(STEPS)
    ]
    return losses, dict(model.named_buffers()), engine.notes


@pytest.mark.parametrize("how", [None, False, True])
@pytest.mark.parametrize("write", WRITES)
def test_they_are_part_of_the_step_and_are_written_once(write, how):
    losses, buffers = plain(write)
    own, held, notes = trained(write, how)
    torch.testing.assert_close(own, losses)
    torch.testing.assert_close(held, buffers)
    assert not any("graph by graph" in note for note in notes)
    assert any("torch.utils.checkpoint" in note for note in notes) == (how is not None)


def of_a_rank(cells):
    return [trained(*cell) for cell in cells]


def test_ranks_hold_what_one_process_holds_or_say_what_they_hold():
    cells = [
        ("in_place", False),
        ("assigned", False),
        ("in_place", False, True),
        ("assigned", None, True),
    ]
    by_rank = launch(of_a_rank, cells, ranks=2)
    for cell, one, other in zip(cells, *by_rank, strict=True):
        torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)
        losses, buffers = plain(cell[0])
        torch.testing.assert_close(one[1]["block.count"], buffers["block.count"])
        if len(cell) == 2:
            torch.testing.assert_close(one[0], losses)
            torch.testing.assert_close(one[1], buffers)
        else:
            assert any("graph by graph" in note for note in one[2])
            assert any("ranks" in note and "own" in note for note in one[2])


class Assigning(nn.Module):
    def __init__(self, assign):
        super().__init__()
        self.linear, self.assign = nn.Linear(WIDTH, WIDTH), assign
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.ones(WIDTH))

    def forward(self, x, y):
        self.assign(self, x)
        return (self.linear(x) - y - self.mean).square().mean()


def swap(model, x):
    model.mean, model.last = model.last, model.mean
    model.mean.add_(1)


def grow(model, x):
    model.last = torch.cat([model.last, x[0]])


def one_for_both(model, x):
    model.mean = model.last = x.mean(0)


def convert(model, x):
    model.last = model.last.double() + 1


def drop(model, x):
    model.last = None


@pytest.mark.parametrize("assign", sampled([swap, grow, one_for_both, convert, drop]))
def test_what_a_buffer_cannot_take_runs_graph_by_graph(assign):
    model, other = Assigning(assign), Assigning(assign)
    other.load_state_dict(model.state_dict())
    engine = stepgraph.Engine(
        other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        mesh="dp=1",
        plan="ddp",
        lowering="eager",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(engine.step(batch(step)), loss.detach())
    torch.testing.assert_close(dict(other.named_buffers()), dict(model.named_buffers()))
    assert "puts another buffer in place of model." in engine.notes[0]


class Returning(Assigning):
    def forward(self, x):
        old, part = self.mean, self.last[:2]
        self.mean, self.last = self.mean + 1, self.last * 2
        return self.linear(x) + self.mean, old, part, self.last


def test_what_is_returned_of_an_old_buffer_is_what_was_in_it():
    model, other = Returning(None), Returning(None)
    other.load_state_dict(model.state_dict())
    x = batch(0)[0]
    parallel = stepgraph.parallelize(other, mesh="dp=1", plan="ddp", example=(x,), lowering="eager")
    for _ in range(2):
        torch.testing.assert_close(parallel(x), model(x))


class Shared(nn.Module):
    """Two modules with one buffer, in whose place one of them puts another."""

    def __init__(self):
        super().__init__()
        self.linear, self.x, self.y = nn.Linear(4, 4), nn.Module(), nn.Module()
        buffer = torch.ones(4)
        self.x.register_buffer("b", buffer)
        self.y.register_buffer("b", buffer)

    def forward(self, x):
        h = self.linear(x) * self.x.b + self.y.b
        self.x.b = self.x.b * 1.5
        return h.square().mean()


def test_a_buffer_that_modules_share_is_parted_by_an_assignment():
    torch.manual_seed(0)
    plain, own = Shared(), Shared()
    own.linear.load_state_dict(plain.linear.state_dict())
    engine = stepgraph.Engine(own, loss=lambda m, x: m(x), plan="ddp", lowering="eager")
    x = torch.randn(4, 4)
    for _ in range(2):
        wanted = plain(x).detach()
        try:
            torch.testing.assert_close(engine.step(x), wanted)
        except stepgraph.errors.StepgraphError:
            return  # said
        torch.testing.assert_close(own.x.b, plain.x.b)
        torch.testing.assert_close(own.y.b, plain.y.b)
