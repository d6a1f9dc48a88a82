"""start_backward_at_one: the tangent is no input any more."""

import torch
from torch import nn

from stepgraph.capture.passes.start_backward_at_one import start_backward_at_one
from stepgraph.program import roles
from tests.support import (
    assert_bitwise,
    assert_golden,
    captured,
    eager,
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


def test_the_backward_begins_with_a_constant():
    program = captured(Scaled(), torch.ones(2, 3))
    assert roles.Tangent() in program.inputs
    after = start_backward_at_one(program.copy())
    assert roles.Tangent() not in after.inputs
    assert_golden(__file__, "start_backward_at_one", program, after)


def test_every_result_is_the_same_bits_and_what_eager_gives():
    model, batch = mlp(), regression_batch()
    program = captured(model, batch)
    inputs = values(model, batch)
    after = inputs.execute(start_backward_at_one(program.copy()))
    assert_bitwise(inputs.execute(program), after)
    reference = eager(model, batch)
    torch.testing.assert_close(after[roles.Loss()], reference["loss"])
    torch.testing.assert_close(after[roles.Grad("first.weight")], reference["first.weight"])


def test_a_program_without_a_tangent_stays_as_it_is():
    program = start_backward_at_one(captured(mlp(), regression_batch()))
    assert str(start_backward_at_one(program.copy())) == str(program)


def test_a_loss_of_two_bytes_begins_with_a_one_of_two_bytes():
    model = Scaled().bfloat16()
    program = start_backward_at_one(captured(model, torch.ones(2, 3, dtype=torch.bfloat16)))
    batch = torch.rand(2, 3).bfloat16()
    results = values(model, batch).execute(program)
    assert results[roles.Grad("weight")].dtype == torch.bfloat16
