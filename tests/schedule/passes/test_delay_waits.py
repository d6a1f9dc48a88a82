"""delay_waits: later waits, the same bits."""

import itertools
from dataclasses import replace

import pytest

from stepgraph import torch_internals
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.program.collectives import is_collective
from stepgraph.schedule.passes.delay_waits import delay_waits
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.waits import find_waits
from tests.sampling import sampled
from tests.schedule.rescheduled import rescheduled
from tests.support import (
    HOST,
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


def merged(model, batch, optimizer, **settings):
    placed = compiled(model, batch, optimizer, **settings).programs["step"]
    return rescheduled(placed, merge_small_collectives)


def delayed(program, together):
    return rescheduled(program, delay_waits, target=replace(HOST, overlaps=together))


def test_the_text_shows_waits_at_their_readers():
    before = merged(mlp(), regression_batch(), adamw(mlp()), ranks=2, plan="zero3")
    assert_golden(__file__, "delay_waits", before, delayed(before, True))


@pytest.mark.parametrize("plan", sampled(["ddp", "zero1", "zero3", "zero2"]))
def test_collectives_overlap_and_every_result_is_the_same_bits(plan):
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    before = compiled(model, batch, optimizer, ranks=3, plan=plan).programs["step"]
    inputs = values(model, batch, optimizer)
    expected = inputs.execute(bound(before))
    assert most_in_flight(before) == 1
    for together in (True, False):
        after = delayed(before, together)
        assert (most_in_flight(after) > 1) is together
        assert computes_in_flight(after)
        assert_bitwise(expected, inputs.execute(bound(after)))


def test_what_was_decided_where_several_may_be_in_flight_is_held_to_one_where_they_may_not():
    model = tiny_llama()
    before = compiled(model, token_batch(), adamw(model), ranks=2, plan="ddp").programs["step"]
    waits = find_waits(before, overlaps=True)
    decision = ScheduleDecision("auto", waits=waits)
    after = [delay_waits(before.copy(), decision, overlaps) for overlaps in (True, False)]
    assert most_in_flight(after[0]) > 1
    assert most_in_flight(after[1]) == 1


@pytest.mark.parametrize("plan", sampled(["zero3", "ddp"]))
def test_merging_leaves_one_in_flight(plan):
    model = tiny_llama()
    before = merged(model, token_batch(), adamw(model), ranks=2, plan=plan, micro_batches=2)
    assert most_in_flight(before) == 1
