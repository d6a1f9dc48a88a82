"""recompute_in_backward: what is not kept is computed again, to the same bits."""

import pytest
import torch
from torch import nn

from stepgraph.memory.decide import decide
from stepgraph.memory.passes.recompute_in_backward import recompute_in_backward
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.program import BACKWARD, FORWARD
from tests.sampling import sampled
from tests.support import (
    RANKS,
    adamw,
    assert_bitwise,
    assert_golden,
    mlp,
    observed_pass,
    regression_batch,
    tiny_llama,
    token_batch,
    values,
)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return torch.relu_(self.linear(x)).square().sum()


def crossing(program):
    """Forward values that the backward reads."""
    return [
        node
        for node in program.operations(FORWARD)
        if any(user.meta.get("phase") == BACKWARD for user in node.users)
    ]


@pytest.fixture(scope="module", params=sampled(reversed(RANKS), every=3))
def step(request):
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    before, _, _ = observed_pass(
        "recompute_in_backward",
        model=model,
        batch=batch,
        optimizer=optimizer,
        ranks=request.param,
    )
    return values(model, batch, optimizer), before


def test_copies_stand_in_the_backward():
    before, after, _ = observed_pass(
        "recompute_in_backward", model=Gated(), batch=torch.ones(2, 3), plan="ddp", memory="full"
    )
    assert crossing(before) and not crossing(after)
    assert_golden(__file__, "recompute_in_backward", before, after)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_every_result_is_the_same_bits(step, policy):
    inputs, before = step
    after = recompute_in_backward(before.copy(), decide(before, policy))
    assert_bitwise(inputs.execute(before), inputs.execute(after))


def test_any_choice_of_values_gives_the_same_bits(step):
    inputs, before = step
    names = [node.meta["name"] for node in before.operations(FORWARD)]
    expected = inputs.execute(before)
    for start in range(3):
        decision = MemoryDecision("every third", dict.fromkeys(names[start::3], 0))
        assert_bitwise(expected, inputs.execute(recompute_in_backward(before.copy(), decision)))


def test_an_empty_decision_changes_nothing(step):
    _, before = step
    assert str(recompute_in_backward(before.copy(), MemoryDecision("none"))) == str(before)


def test_the_second_compilation_takes_the_first_ones_decision(step):
    _, before = step
    decision = decide(before, "full")
    assert str(recompute_in_backward(before.copy(), decision)) == str(
        recompute_in_backward(before.copy(), decision)
    )


def test_a_transformer_keeps_the_residual_stream_only():
    model, batch = tiny_llama(3), token_batch()
    before, after, _ = observed_pass(
        "recompute_in_backward", model=model, batch=batch, ranks=2, memory="full"
    )
    assert len(crossing(after)) < len(crossing(before)) / 2
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(before), inputs.execute(after))


def test_a_gathered_parameter_is_gathered_again_under_zero3():
    model, batch = mlp(), regression_batch()
    _, after, _ = observed_pass("recompute_in_backward", model=model, batch=batch, ranks=2)
    again = [
        node.meta["recomputed_from"]
        for node in after.operations()
        if "recomputed_from" in node.meta
    ]
    assert any(name.startswith("second.weight") for name in again)


def test_an_in_place_operation_of_the_users_code_is_recomputed_from_its_input():
    model, batch = Gated(), torch.randn(4, 3)
    before, after, _ = observed_pass(
        "recompute_in_backward", model=model, batch=batch, memory="full", ranks=2
    )
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(before), inputs.execute(after))
