"""clip_gradients and update_parameters: torch's own arithmetic, inside the program."""

import pytest
import torch
from torch import nn

from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.optimizer import functionalize_optimizer
from stepgraph.capture.passes.clip_gradients import clip_gradients
from stepgraph.capture.passes.start_backward_at_one import start_backward_at_one
from stepgraph.capture.passes.update_parameters import update_parameters
from stepgraph.program import roles
from tests.support import (
    adamw,
    assert_golden,
    assert_summation,
    captured,
    compiled,
    mlp,
    regression_batch,
    tiny_llama,
    token_batch,
    values,
)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return (x * self.a * self.b).sum()


def joint(model, batch):
    return start_backward_at_one(captured(model, batch))


def updated(program, model, optimizer):
    named = dict(model.named_parameters())
    functional, counters = functionalize_optimizer(optimizer, named), SharedCounters()
    counters.cover(functional, named, {})
    return update_parameters(program, functional, counters)


# --------------------------------------------------------------------------------- clip_gradients


def test_clipping_is_one_norm_over_all_gradients():
    before = joint(Pair(), torch.ones(2, 3))
    assert_golden(__file__, "clip_gradients", before, clip_gradients(before.copy(), True))


@pytest.mark.parametrize("limit", [1e-3, 0.1, 1e6])
def test_gradients_are_clipped_as_torch_clips_them(limit):
    model, batch = mlp(scaled=False), regression_batch()
    before = joint(model, batch)
    inputs = values(model, batch, max_grad_norm=limit)
    gradients, found = inputs.execute(before), inputs.execute(clip_gradients(before.copy(), True))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[roles.Grad(name)].clone()
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    expected = {roles.Grad(name): p.grad for name, p in model.named_parameters()}
    assert_summation(expected, found)
    assert torch.equal(found[roles.Loss()], gradients[roles.Loss()])


def test_a_gradient_of_no_dimension_keeps_its_dtype():
    model, batch = mlp(), regression_batch()
    results = values(model, batch, max_grad_norm=0.1).execute(
        clip_gradients(joint(model, batch), True)
    )
    assert results[roles.Grad("scale")].dtype == torch.float32


def test_the_norm_of_two_byte_gradients_is_summed_in_four():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((512,), 1.0, dtype=torch.bfloat16))

        def forward(self, x):
            return (x * self.weight).sum()

    batch = torch.ones(1, 512, dtype=torch.bfloat16)
    found = values(Wide(), batch, max_grad_norm=1.0).execute(
        clip_gradients(joint(Wide(), batch), True)
    )
    assert found[roles.Grad("weight")].dtype == torch.bfloat16
    norm = found[roles.Grad("weight")].float().norm()
    assert abs(norm.item() - 1) < 2e-2


def test_a_step_that_does_not_clip_stays_as_it_is():
    before = joint(Pair(), torch.ones(2, 3))
    assert str(clip_gradients(before.copy(), False)) == str(before)


# ------------------------------------------------------------------------------ update_parameters


def test_without_an_optimizer_gradients_are_results():
    before = joint(Pair(), torch.ones(2, 3))
    assert str(update_parameters(before.copy(), None, SharedCounters())) == str(before)


def test_the_update_replaces_each_gradient_by_a_new_parameter():
    model = Pair()
    before = joint(model, torch.ones(2, 3))
    after = updated(before.copy(), model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert_golden(__file__, "update_parameters", before, after)


def test_new_parameters_and_states_are_those_of_torch():
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model, weight_decay=0.1, amsgrad=True)
    before = joint(model, batch)
    after = updated(before.copy(), model, optimizer)
    inputs = values(model, batch, optimizer)
    found = inputs.execute(after)
    expected = inputs.stepped(inputs.execute(before), after)
    assert {type(role).__name__ for role in expected} == {"NewParam", "NewOptimizerState"}
    assert_summation(expected, found)


def test_numbers_of_two_groups_stay_apart():
    model, batch = mlp(), regression_batch()
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.first.parameters()), "lr": 0.5},
            {"params": [model.second.weight, model.scale], "lr": 0.25},
        ]
    )
    before = joint(model, batch)
    inputs = values(model, batch, optimizer)
    gradients = inputs.execute(before)
    found = inputs.execute(updated(before.copy(), model, optimizer))
    for name, rate in (("first.weight", 0.5), ("second.weight", 0.25)):
        expected = model.get_parameter(name) - rate * gradients[roles.Grad(name)]
        torch.testing.assert_close(found[roles.NewParam(name)], expected.detach())


def test_a_step_counter_is_one_number_for_a_group():
    model = mlp(scaled=False)
    program = compiled(model, regression_batch(), adamw(model)).programs["step"]
    counters = [
        role
        for role in program.inputs
        if isinstance(role, roles.OptimizerState) and role.key == "step"
    ]
    assert counters == [roles.OptimizerState("group0", "step")]


def test_parameters_outside_the_optimizer_keep_their_gradients():
    model, batch = mlp(), regression_batch()
    after = updated(joint(model, batch), model, torch.optim.SGD(model.first.parameters(), lr=0.1))
    assert roles.NewParam("first.weight") in after.outputs
    assert roles.Grad("second.weight") in after.outputs
    assert roles.NewParam("second.weight") not in after.outputs


def test_bias_corrections_are_computed_once_for_a_group():
    def scalars(layers):
        model = tiny_llama(layers)
        program = compiled(model, token_batch(), adamw(model)).programs["step"]
        return sum(
            isinstance(v := node.meta["val"], torch.Tensor) and not v.dim()
            for node in program.operations("optimizer")
        )

    assert scalars(1) == scalars(2) < 30
