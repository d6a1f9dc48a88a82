"""write_state_in_place: new state is written where the old one lives, when nobody reads that any more."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgraph import torch_internals
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.program import roles
from stepgraph.program.copies import TO_DEVICE, TO_HOST, TO_HOST_INTO, WAIT_HOST, is_on_host
from stepgraph.program.program import is_write
from stepgraph.program.text import program_text
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early
from tests.sampling import sampled
from tests.schedule.rescheduled import rescheduled
from tests.support import (
    RANKS,
    adamw,
    assert_bitwise,
    assert_golden_text,
    bound,
    compiled,
    mlp,
    regression_batch,
    values,
)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum()


def lowered(program):
    """Every rank's own Program, its small collectives merged, before and after."""
    before = bound(rescheduled(program, merge_small_collectives))
    return before, [write_state_in_place(each.copy()) for each in before]


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_the_text_shows_each_write_behind_its_producer(plan):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = compiled(model, torch.ones(2, 3), optimizer, ranks=2, plan=plan).programs["step"]
    before, after = lowered(program)
    text = f"{program_text(before[0], 'before')}\n"
    text += program_text(after[0], "after write_state_in_place")
    assert_golden_text(__file__, f"write_state_in_place_{plan}", text)


@pytest.mark.parametrize(
    ("plan", "ranks"),
    sampled(list(product(["ddp", "zero1", "zero2", "zero3"], RANKS)), every=3),
)
def test_every_result_and_every_new_state_is_the_same_bits(plan, ranks):
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    placed = compiled(model, batch, optimizer, ranks=ranks, plan=plan).programs["step"]
    before, after = lowered(placed)
    inputs = values(model, batch, optimizer)
    expected, found = inputs.execute(before), inputs.execute(after, in_place=True)
    assert roles.NewParam("first.weight") in expected.keys() & found.keys()
    assert_bitwise(expected, found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_on_the_host_are_written_there_by_their_copies(ranks):
    model, batch = mlp(), regression_batch()
    optimizer, away = adamw(model), "optimizer=offload"
    step = compiled(model, batch, optimizer, ranks=ranks, memory=away).programs["step"]
    before, after = lowered(step)
    for program in after:
        called = [node.target for node in program.operations()]
        assert TO_HOST not in called
        assert called.count(TO_HOST_INTO) == called.count(WAIT_HOST) == called.count(TO_DEVICE) > 0
        left = [n for n in program.operations() if n.target is torch_internals.mutable_copy]
        assert not any(is_on_host(node.args[0]) for node in left)
    inputs = values(model, batch, optimizer)
    assert_bitwise(inputs.execute(before), inputs.execute(after, in_place=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_accumulators_are_written_in_place(ranks):
    model, batch = mlp("count"), regression_batch()
    optimizer = adamw(model)
    programs = compiled(model, batch, optimizer, ranks=ranks, micro_batches=2).programs
    for program in programs.values():
        before, after = lowered(program)
        inputs = values(model, batch, optimizer)
        assert_bitwise(inputs.execute(before), inputs.execute(after, in_place=True))
    assert not after[0].outputs or all(isinstance(role, roles.Loss) for role in after[0].outputs)


def test_nothing_reads_an_old_value_after_it_is_overwritten():
    model = mlp()
    placed = compiled(model, regression_batch(), adamw(model), ranks=2).programs["step"]
    for program in lowered(placed)[1]:
        overwritten = set()
        for node in program.operations():
            assert not overwritten & set(node.all_input_nodes), node
            if is_write(node):
                target = node.kwargs.get("out", node.args[0])
                overwritten.add(target)


def test_an_all_gather_writes_straight_into_the_parameter():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).sum()

    whole = Sum()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    placed = compiled(whole, torch.ones(2, 4), optimizer, ranks=2, plan="zero1").programs["step"]
    _, after = lowered(placed)
    targets = [node.target for node in after[0].operations()]
    assert torch_internals.ALL_GATHER_INTO in targets
    assert torch_internals.mutable_copy not in targets


def test_a_state_that_does_not_change_is_not_written():
    model = mlp()
    placed = compiled(model, regression_batch(), ranks=2).programs["step"]
    _, after = lowered(placed)
    assert not any(is_write(node) for node in after[0].operations())
    assert set(after[0].outputs) == set(placed.outputs)


class Snapshot(nn.Module):
    """Keeps the last weight in a buffer that recomputation reads, and swaps two other buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        for name in ("old", "left", "right"):
            self.register_buffer(name, torch.randn(4, 4))

    def forward(self, x):
        def run(x):
            return torch.tanh(self.first(x)) @ (self.old + self.left)

        hidden = checkpoint(run, x, use_reentrant=False)
        with torch.no_grad():
            left = self.left.clone()
            self.old.copy_(self.last.weight)
            self.left.copy_(self.right)
            self.right.copy_(left)
        return self.last(torch.tanh(hidden)).square().mean()


@pytest.mark.parametrize(("ranks", "early"), sampled(list(product((1, 2), (False, True))), every=3))
def test_an_old_value_that_is_a_result_is_kept_from_being_overwritten(ranks, early):
    torch.manual_seed(0)
    model, batch = Snapshot(), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    placed = compiled(model, batch, optimizer, ranks=ranks, plan="ddp").programs["step"]
    before = rescheduled(placed, merge_small_collectives)
    after = rescheduled(before, update_early) if early else before
    inputs = values(model, batch, optimizer)
    written = [write_state_in_place(each) for each in bound(after)]
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(written, in_place=True))
