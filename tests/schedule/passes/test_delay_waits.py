"""delay_waits: later waits, the same bits."""

import itertools

import pytest

from stepgraph import torch_internals
from stepgraph.program.collectives import is_collective
from stepgraph.program.invariants import check_invariants
from stepgraph.schedule.passes.delay_waits import delay_waits
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from tests.support import (
    adamw,
    assert_bitwise,
    assert_golden,
    bound,
    compiled,
    mlp,
    regression_batch,
    tiny_llama,
    token_batch,
    values,
)


def most_in_flight(program):
    """The most collectives that have started and are not yet awaited."""
    now = most = 0
    for node in program.operations():
        now += is_collective(node) - (node.target is torch_internals.WAIT)
        most = max(most, now)
    return most


def computes_in_flight(program):
    """Whether something else runs between a collective and its wait."""
    nodes = list(program.operations())
    return any(
        is_collective(node) and behind.target is not torch_internals.WAIT
        for node, behind in itertools.pairwise(nodes)
    )


def programs(model, batch, optimizer, **settings):
    placed = compiled(model, batch, optimizer, **settings).programs["step"]
    return [merge_small_collectives(each) for each in bound(placed)]


def test_the_text_shows_waits_at_their_readers():
    before = programs(mlp(), regression_batch(), adamw(mlp()), ranks=2, plan="zero3")[0]
    assert_golden(__file__, "delay_waits", before, delay_waits(before.copy(), True))


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3"])
def test_collectives_overlap_and_every_result_is_the_same_bits(plan):
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    placed = compiled(model, batch, optimizer, ranks=3, plan=plan).programs["step"]
    before = bound(placed)
    inputs = values(model, batch, optimizer)
    assert most_in_flight(before[0]) == 1
    for together in (True, False):
        after = [delay_waits(program.copy(), together) for program in before]
        for program in after:
            check_invariants(program, "delay_waits")
        assert (most_in_flight(after[0]) > 1) is together
        assert computes_in_flight(after[0])
        assert_bitwise(inputs.execute(before), inputs.execute(after))


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_merging_leaves_one_in_flight(plan):
    model = tiny_llama()
    before = programs(model, token_batch(), adamw(model), ranks=2, plan=plan, micro_batches=2)
    assert most_in_flight(before[0]) == 1
