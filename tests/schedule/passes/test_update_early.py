"""update_early: the optimizer's operations move into the backward; the same bits."""

from dataclasses import replace

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.cost.memory import memory_timeline
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.operators.views import PARTS_OF_A_RESULT
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import WAIT_COPY, is_on_host
from stepgraph.program.program import BACKWARD, FORWARD, OPTIMIZER
from stepgraph.schedule import decide
from stepgraph.schedule.passes.delay_waits import delay_waits
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early
from tests.sampling import sampled
from tests.schedule.rescheduled import rescheduled
from tests.support import (
    HOST,
    adamw,
    assert_bitwise,
    assert_golden,
    bound,
    compiled,
    tiny_llama,
    token_batch,
    values,
)

PLANS = ["ddp", "zero1", "zero2", "zero3"]


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch):
    """Tiny models have several flat collectives too."""
    sizes = replace(decide.sizes_for(HOST), reduction=4096, gather=4096)
    monkeypatch.setattr(decide, "sizes_for", lambda target: sizes)


def merged(model, batch, optimizer, **settings):
    settings = {"ranks": 2} | settings
    placed = compiled(model, batch, optimizer, **settings).programs["step"]
    return rescheduled(placed, merge_small_collectives)


def early(program):
    return rescheduled(program, update_early)


def delayed(program):
    return rescheduled(program, delay_waits)


def written(program):
    """Every rank's own Program, with its state written in place."""
    return [write_state_in_place(each) for each in bound(program)]


def positions(program, choose):
    return [i for i, node in enumerate(program.operations()) if choose(node)]


def phase(name):
    return lambda node: node.meta["phase"] == name


def test_the_text_shows_updates_in_the_backward():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1), torch.nn.Flatten(0))

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            return self.body(x).square().mean()

    loss = Loss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    before = compiled(loss, torch.ones(4, 2), optimizer, ranks=2, plan="ddp").programs["step"]
    assert_golden(__file__, "update_early", before, early(before))


@pytest.mark.parametrize(
    ("plan", "clip"), sampled([(p, clip) for p in PLANS for clip in (False, True)], every=5)
)
def test_every_result_is_the_same_bits(plan, clip):
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    before = merged(model, batch, optimizer, plan=plan, clip=clip)
    after = early(before)
    inputs = values(model, batch, optimizer, 0.5 if clip else None)
    expected = inputs.execute(bound(before))
    assert_bitwise(expected, inputs.execute(bound(after)))
    assert_bitwise(expected, inputs.execute(written(delayed(after)), in_place=True))


@pytest.mark.parametrize("plan", sampled(PLANS, every=4))
def test_most_updates_run_before_the_backward_ends(plan):
    model = tiny_llama()
    before = merged(model, token_batch(), adamw(model), plan=plan)
    after = early(before)
    end = positions(after, phase(BACKWARD))[-1]
    updates = positions(after, phase(OPTIMIZER))
    assert sum(i < end for i in updates) > len(updates) / 2
    assert min(positions(before, phase(OPTIMIZER))) > positions(before, phase(BACKWARD))[-1]


@pytest.mark.parametrize("plan", sampled(reversed(PLANS), every=4))
def test_an_update_starts_behind_the_collective_after_its_own(plan):
    model = tiny_llama()
    after = delayed(early(merged(model, token_batch(), adamw(model), plan=plan)))
    nodes = list(after.operations())
    place = {node: i for i, node in enumerate(nodes)}
    started = [n for n in nodes if is_collective(n) and n.meta["phase"] != OPTIMIZER]
    for earlier, later in zip(started, started[1:], strict=False):
        (wait,) = earlier.users
        readers = [wait]
        for reader in readers:
            parts = [user for user in reader.users if user.target in PARTS_OF_A_RESULT]
            readers += parts
            for user in set(reader.users) - set(parts):
                if user.op == "call_function" and user.meta["phase"] == OPTIMIZER:
                    assert place[user] > place[later]


@pytest.mark.parametrize("plan", sampled(["zero1", "zero2"]))
def test_what_updates_send_is_sent_where_it_was(plan):
    model = tiny_llama()
    after = early(merged(model, token_batch(), adamw(model), plan=plan))
    end = positions(after, phase(BACKWARD))[-1]
    sent = positions(after, lambda n: is_collective(n) and n.meta["phase"] == OPTIMIZER)
    assert sent
    assert all(i > end for i in sent)


def test_clipped_updates_wait_for_every_gradient():
    model = tiny_llama()
    after = early(merged(model, token_batch(), adamw(model), plan="ddp", clip=True))
    reduced = [n.users for n in after.operations() if is_collective(n) and phase(BACKWARD)(n)]
    last = max(positions(after, lambda n: any(n in users for users in reduced)))
    writes = {
        node
        for role, node in zip(after.outputs, after.results, strict=True)
        if type(role).__name__ == "NewParam"
    }
    assert min(positions(after, writes.__contains__)) > last


def test_nothing_is_overwritten_before_it_is_read_for_the_last_time():
    """A tied weight is read by the first operation and by the last; its views count too."""
    model = tiny_llama(tie_word_embeddings=True)
    batch = token_batch()
    optimizer = adamw(model)
    before = merged(model, batch, optimizer, plan="ddp")
    last = written(early(before))
    copies = torch_internals.mutable_copy
    for program in last:
        nodes = list(program.operations())
        for i, node in enumerate(nodes):
            if node.target is copies:
                assert not any(node.args[0] in later.all_input_nodes for later in nodes[i + 1 :])
    inputs = values(model, batch, optimizer)
    assert_bitwise(inputs.execute(bound(before)), inputs.execute(last, in_place=True))


def test_states_on_the_host_come_while_the_update_before_theirs_runs():
    model, batch = tiny_llama(2), token_batch()
    optimizer = adamw(model)
    program = merged(model, batch, optimizer, plan="zero3", memory="optimizer=offload")
    moved = early(program)
    place = {node: i for i, node in enumerate(moved.operations())}
    waits = [n for n in place if n.target is WAIT_COPY and not is_on_host(n)]
    reads = {wait: min(place[user] for user in wait.users) for wait in waits}
    starts = [place[wait.args[0]] for wait in waits]
    assert min(starts) < max(place[n] for n in place if n.meta["phase"] == BACKWARD)
    updates = sorted({*reads.values()})
    beside = [
        sum(start < at < read for at in updates)
        for start, read in zip(starts, reads.values(), strict=True)
    ]
    assert sum(map(bool, beside)) > len(beside) / 2
    given = values(model, batch, optimizer)
    assert_bitwise(given.execute(bound(moved)), given.execute(bound(program)))


@pytest.mark.slow
def test_gradients_no_longer_pile_up():
    model = tiny_llama()
    before = merged(model, token_batch(2, 2), adamw(model), plan="ddp")
    lives = [memory_timeline(written(delayed(p))[0]) for p in (before, early(before))]
    gradients = [timeline.peak_of("gradients") for timeline in lives]
    assert gradients[1] < gradients[0] / 2
    assert lives[1].peak() < lives[0].peak()


@pytest.mark.slow
def test_a_collective_of_the_forward_may_stand_behind_the_optimizers():
    """Where merging has put it, whose readers are late: updates behind it hold up what sends them."""
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    program = merged(model, batch, optimizer, plan="zero1")
    chain = [n for n in program.operations() if is_collective(n) and phase(FORWARD)(n)][-1:]
    for node in chain:  # grows
        chain += [user for user in node.users if user.op == "call_function"]
    assert len(chain) > 1 and all(map(phase(FORWARD), chain))
    for node in dict.fromkeys(chain):
        program.graph.output_node().prepend(node)
    given = values(model, batch, optimizer)
    assert_bitwise(given.execute(bound(early(program))), given.execute(bound(program)))
