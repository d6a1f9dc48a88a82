"""offload_states: states wait on the host between updates, and come in time for theirs."""

import functools

import pytest
import torch
from torch import nn

from stepgraph.cost.memory import memory_timeline
from stepgraph.memory.decide import decide
from stepgraph.memory.passes.offload_states import names_of_states, offload_states, states_of
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY, is_on_host
from stepgraph.program.invariants import check_invariants
from stepgraph.program.program import OPTIMIZER
from stepgraph.program.roles import label
from tests.support import (
    RANKS,
    adamw,
    assert_bitwise,
    assert_golden,
    mlp,
    observed_pass,
    regression_batch,
    values,
)

OPTIMIZERS = {
    "adamw": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.1),
}


class TwoWeights(nn.Module):
    """The fewest: one state for each."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).sum()


@functools.cache
def step(ranks, optimizer="adamw"):
    """The inputs of a step, and it before the pass."""
    model, batch = mlp(), regression_batch()
    asked = {"model": model, "batch": batch, "optimizer": OPTIMIZERS[optimizer](model)}
    before, _, _ = observed_pass("offload_states", ranks=ranks, **asked)
    return values(model, batch, OPTIMIZERS[optimizer](model)), before


def copies(program, target):
    return [node for node in program.operations() if node.target is target]


def test_a_state_comes_before_its_update_and_goes_behind_it():
    model = TwoWeights()
    before, after, _ = observed_pass(
        "offload_states",
        model=model,
        batch=torch.ones(2, 4),
        optimizer=OPTIMIZERS["sgd"](model),
        plan="ddp",
        memory="optimizer=offload",
    )
    assert_golden(__file__, "offload_states", before, after)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_any_choice_of_states_gives_the_same_bits(ranks, optimizer):
    inputs, before = step(ranks, optimizer)
    names = [label(role) for role, _, _ in states_of(before)]
    expected = inputs.execute(before)
    for chosen in (names, names[::2], names[1::3]):
        after = offload_states(before.copy(), MemoryDecision("some", offload=tuple(chosen)))
        check_invariants(after)
        assert len(copies(after, TO_HOST)) == len(copies(after, TO_DEVICE)) == len(chosen)
        assert_bitwise(expected, inputs.execute(after))


def test_an_empty_decision_changes_nothing():
    _, before = step(2)
    assert str(offload_states(before.copy(), MemoryDecision("none"))) == str(before)
    unknown = MemoryDecision("none", offload=("OptimizerState(no.such)",))
    assert str(offload_states(before.copy(), unknown)) == str(before)


def test_the_second_compilation_takes_the_first_ones_decision():
    _, before = step(2)
    decision = decide(before, "optimizer=offload")
    one, other = (str(offload_states(before.copy(), decision)) for _ in range(2))
    assert one == other != str(before)


def test_the_largest_are_taken_first_and_no_more_than_is_needed():
    _, before = step(1)
    sizes = {label(role): n.meta["val"].nbytes for role, n, _ in states_of(before)}
    most = max(sizes.values())
    assert names_of_states(before, 0) == ()
    assert [sizes[name] for name in names_of_states(before, 1)] == [most]
    assert {*names_of_states(before)} == {*sizes}
    chosen = names_of_states(before, most + 1)
    assert len(chosen) == 2 and sum(map(sizes.get, chosen)) > most


def test_states_take_no_memory_of_the_device_until_their_update():
    _, before = step(1)
    decision = decide(before, "optimizer=offload")
    after = offload_states(before.copy(), decision)
    kept, away = memory_timeline(before), memory_timeline(after)
    held = sum(node.meta["val"].nbytes for _, node, _ in states_of(before))
    assert kept.at[0]["optimizer"] - away.at[0]["optimizer"] == held
    assert not kept.on_host and away.on_host >= held


def test_a_state_is_on_its_way_while_the_update_before_it_runs():
    _, before = step(1)
    after = offload_states(before.copy(), decide(before, "optimizer=offload"))
    place = {node: i for i, node in enumerate(after.graph.nodes)}
    waits = [n for n in copies(after, WAIT_COPY) if not is_on_host(n)]
    updates = sorted({place[min(w.users, key=place.__getitem__)] for w in waits})
    for wait in waits:
        first = place[min(wait.users, key=place.__getitem__)]
        at = updates.index(first)
        if at:  # it was started before the update before its own
            assert place[wait.args[0]] < updates[at - 1] < place[wait]
    assert all(n.meta["phase"] == OPTIMIZER for n in copies(after, TO_HOST))
