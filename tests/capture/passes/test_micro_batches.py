"""accumulate_gradients and finish_accumulation: micro-batches give the whole batch's result."""

import pytest
import torch
from torch import nn

from stepgraph.analysis.loss_normalisation import find_normalisation
from stepgraph.capture.passes.accumulate_gradients import accumulate_gradients
from stepgraph.capture.passes.finish_accumulation import finish_accumulation
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from tests.support import (
    assert_golden,
    assert_summation,
    captured,
    eager,
    mlp,
    regression_batch,
    values,
)


class Counted(nn.Module):
    """A sum over the batch, divided by a count."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, weight):
        return (x @ self.weight * weight).sum() / weight.sum()


BATCH = (torch.ones(2, 3), torch.ones(2))


def rewritten(model, batch, count=3):
    joint = captured(model, batch)
    normalisation = find_normalisation(joint)
    accumulate = accumulate_gradients(joint.copy(), normalisation)
    return joint, accumulate, finish_accumulation(joint.copy(), normalisation, count)


def run(model, whole, count):
    """Loss and gradients of ``whole``, in ``count`` micro-batches."""
    pieces = list(zip(*(leaf.chunk(count) for leaf in whole), strict=True))
    _, accumulate, step = rewritten(model, pieces[0], count)
    inputs = values(model, whole, settings=StepSettings(micro_batches=count))
    inputs.execute(accumulate)  # makes the accumulators
    inputs.accumulating = accumulate
    inputs.accumulate()
    return inputs.execute(step)


def test_gradients_sums_and_counts_are_added_to_accumulators():
    joint, accumulate, _ = rewritten(Counted(), BATCH)
    assert not any(isinstance(role, (roles.Grad, roles.Loss)) for role in accumulate.outputs)
    assert_golden(__file__, "accumulate_gradients", joint, accumulate)


def test_the_last_micro_batch_divides_totals():
    joint, _, step = rewritten(Counted(), BATCH)
    assert_golden(__file__, "finish_accumulation", joint, step)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "count"])
def test_micro_batches_give_the_loss_and_gradients_of_the_whole_batch(reduction, count):
    model, whole = mlp(reduction), regression_batch()
    found, expected = run(model, whole, count), eager(model, whole)
    torch.testing.assert_close(found[roles.Loss()], expected["loss"])
    for name, _ in model.named_parameters():
        torch.testing.assert_close(found[roles.Grad(name)], expected[name])


@pytest.mark.parametrize("reduction", ["mean", "sum", "count"])
def test_a_micro_batch_is_added_to_what_is_there(reduction):
    model, batch = mlp(reduction), regression_batch()
    joint, accumulate, _ = rewritten(model, batch)
    inputs = values(model, batch)
    expected = accumulate_gradients.reference(inputs, joint, accumulate, find_normalisation(joint))
    found = inputs.execute(accumulate)
    assert any(role.name.startswith("grad:") for role in expected)
    assert expected.keys() <= found.keys()
    assert_summation(expected, found)


def test_one_batch_is_nothing_to_finish():
    joint = captured(mlp(), regression_batch())
    assert str(finish_accumulation(joint.copy(), None, 1)) == str(joint)


def test_a_micro_batch_of_weight_zero_does_no_harm():
    model, (x, y, weight) = mlp("count"), regression_batch()
    weight[:4] = 0
    found, expected = run(model, (x, y, weight), 3), eager(model, (x, y, weight))
    torch.testing.assert_close(found[roles.Loss()], expected["loss"])
    torch.testing.assert_close(found[roles.Grad("first.bias")], expected["first.bias"])


def test_a_loss_that_needs_the_whole_batch_is_the_mean_over_micro_batches():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = x * self.weight
            return ((y - y.mean(0, keepdim=True)) ** 2).mean()

    model, whole = Spread(), torch.randn(6, 3)
    found = run(model, (whole,), 3)
    each = [eager(model, piece) for piece in whole.chunk(3)]
    torch.testing.assert_close(found[roles.Loss()], sum(e["loss"] for e in each) / 3)
    torch.testing.assert_close(found[roles.Grad("weight")], sum(e["weight"] for e in each) / 3)


def test_the_programs_do_not_grow_with_the_number_of_micro_batches():
    sizes = {
        len(list(rewritten(mlp("count"), regression_batch(), n)[2].operations())) for n in (2, 9)
    }
    assert len(sizes) == 1
