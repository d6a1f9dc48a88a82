"""communicate_between_layers: a bucket that is full within some layer is sent where the layer ends."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.lowering.passes.communicate_between_layers import communicate_between_layers
from stepgraph.lowering.passes.fuse_updates import fuse_updates
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.lowering.repeats import Reader
from stepgraph.pipeline import SCHEDULED
from stepgraph.program.collectives import is_collective
from stepgraph.program.text import program_text
from tests.sampling import sampled
from tests.schedule.rescheduled import rescheduled
from tests.support import (
    HOST,
    assert_bitwise,
    assert_golden_text,
    bound,
    compiled,
    tiny_llama,
    token_batch,
    values,
)

SMALL = replace(HOST, call_bytes=8192)  # a bucket holds a few layers of the models below


class Blocks(nn.Module):
    """Blocks whose backward goes on behind their last gradient."""

    def __init__(self, count=6, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            h = torch.sin(torch.exp(torch.cos(x)))
            x = x + torch.tanh(layer(h))
        return x.square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def moved(model, batch, optimizer, target=SMALL, **how):
    """Every rank's own Program as it is executed, before the pass and behind it."""
    placed = compiled(model, batch, optimizer, **how).programs["step"]
    before = [
        write_state_in_place(p) for p in bound(rescheduled(placed, *SCHEDULED, target=target))
    ]
    before = [fuse_updates(each, fuses=True) for each in before]
    return before, [communicate_between_layers(each.copy()) for each in before]


def communication(program):
    """Collectives and waits, in order."""
    nodes = program.operations()
    wanted = [n for n in nodes if is_collective(n) or n.target is torch_internals.WAIT]
    return [node.meta["name"] for node in wanted]


def divided(program):
    return [len(layers.splits) for layers in Reader(program).text().layers]


def test_the_text_shows_a_bucket_that_waits_for_the_end_of_its_layer():
    torch.manual_seed(0)
    model = Blocks(4)
    tiny = replace(HOST, call_bytes=32)
    before, after = moved(model, torch.randn(4, 4), sgd(model), tiny, ranks=2, plan="ddp")
    text = program_text(before[0], "before")
    text += f"\n{program_text(after[0], 'after communicate_between_layers')}"
    assert_golden_text(__file__, "communicate_between_layers", text)


@pytest.mark.parametrize("plan", sampled(["zero3", "ddp", "zero1"], every=3))
def test_layers_are_alike_and_a_step_is_the_same(plan):
    model, batch = tiny_llama(9), token_batch(rows=4)
    before, after = moved(model, batch, adamw(model), ranks=2, plan=plan)
    assert str(before[0]) != str(after[0])
    assert sum(divided(after[0])) <= sum(divided(before[0]))
    for one, other in zip(before, after, strict=True):
        other.graph.lint()
        assert communication(one) == communication(other)
    inputs = values(model, batch, adamw(model))
    expected = inputs.execute(before, in_place=True)
    assert_bitwise(expected, inputs.execute(after, in_place=True))


def test_a_layers_own_collectives_stay_between_the_same_others():
    """Statistics of batches: each layer communicates, too."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(8, 4)
    model.layers = nn.ModuleList(nn.Sequential(layer, nn.BatchNorm1d(4)) for layer in model.layers)
    tiny = replace(HOST, call_bytes=64)
    before, after = moved(model, x, adamw(model), tiny, ranks=2, plan="zero3")
    assert communication(before[0]) == communication(after[0])
    inputs = values(model, x, adamw(model))
    expected = inputs.execute(before, in_place=True)
    assert_bitwise(expected, inputs.execute(after, in_place=True))


def test_all_ranks_communicate_in_the_same_order_whatever_their_shards():
    """Rows that do not divide: one rank's operations have other shapes than another's."""
    torch.manual_seed(0)
    model = Blocks(8, width=5)
    _, ranks = moved(model, torch.randn(6, 5), adamw(model), ranks=3, plan="zero3")
    orders = [communication(program) for program in ranks]
    assert orders[0] == orders[1] == orders[2]


class Looks(nn.Module):
    """The loss reads a weight that a layer in the middle has had gathered, too."""

    def __init__(self):
        super().__init__()
        self.blocks = Blocks(8)

    def forward(self, x):
        return self.blocks(x) + self.blocks.layers[3].weight.square().sum()


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_what_others_read_stays_before_them(plan):
    torch.manual_seed(0)
    model, x = Looks(), torch.randn(4, 4)
    tiny = replace(HOST, call_bytes=48)
    before, after = moved(model, x, adamw(model), tiny, ranks=2, plan=plan)
    inputs = values(model, x, adamw(model))
    expected = inputs.execute(before, in_place=True)
    assert_bitwise(expected, inputs.execute(after, in_place=True))
