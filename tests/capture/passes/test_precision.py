"""cast_parameters and reduce_gradients_in: masters in one type, computation in another."""

import pytest
import torch
from torch import nn

from stepgraph.capture.module import capture, default_loss
from stepgraph.capture.passes.cast_parameters import cast_parameters
from stepgraph.capture.passes.reduce_gradients_in import reduce_gradients_in
from stepgraph.planning.request import Precision
from stepgraph.program import roles
from tests.support import assert_bitwise, assert_golden, mlp, regression_batch, spec_of, values

BF16 = Precision(torch.bfloat16)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5, bias=False)

    def forward(self, x):
        return self.linear(x).square().mean()


def captured_in(model, batch, precision):
    return capture(model, default_loss, spec_of(batch), compute_dtype=precision.compute)[0]


def masters_of(model):
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def types(program, kind):
    rows = zip(program.inputs, program.input_values, strict=True)
    rows = [*rows, *zip(program.outputs, program.output_values, strict=True)]
    return {value.dtype for role, value in rows if isinstance(role, kind)}


def test_parameters_are_read_through_a_cast():
    model, batch = Linear(), torch.ones(2, 3)
    program = captured_in(model, batch, BF16)
    assert types(program, roles.Param) == {torch.bfloat16}
    after = cast_parameters(program.copy(), masters_of(model), BF16, False)
    assert types(after, roles.Param) == {torch.float32}
    assert types(after, roles.Grad) == {torch.bfloat16}
    assert_golden(__file__, "cast_parameters", program, after)


def test_gradients_arrive_as_the_parameters_are_stored():
    model, batch = Linear(), torch.ones(2, 3)
    program = captured_in(model, batch, BF16)
    program = cast_parameters(program, masters_of(model), BF16, False)
    after = reduce_gradients_in(program.copy(), masters_of(model), BF16)
    assert types(after, roles.Grad) == {torch.float32}
    assert_golden(__file__, "reduce_gradients_in", program, after)


def test_a_cast_changes_no_bit():
    model, batch = mlp(), regression_batch()
    program = captured_in(model, batch, BF16)
    inputs = values(model, batch)
    old = inputs.execute(program)
    assert_bitwise(old, inputs.execute(cast_parameters(program, masters_of(model), BF16, False)))


@pytest.mark.parametrize("reduce", [None, torch.float32, torch.float16])
def test_accumulated_gradients_are_of_the_stored_type(reduce):
    model, batch = Linear(), torch.ones(2, 3)
    precision = Precision(torch.bfloat16, reduce)
    program = captured_in(model, batch, precision)
    after = cast_parameters(program, masters_of(model), precision, True)
    assert types(after, roles.Grad) == {torch.float32}


def test_without_a_type_nothing_is_cast():
    model, batch = Linear(), torch.ones(2, 3)
    program = captured_in(model, batch, Precision())
    before = len(list(program.operations()))
    for rewrite in (
        lambda p: cast_parameters(p, masters_of(model), Precision(), True),
        lambda p: reduce_gradients_in(p, masters_of(model), Precision()),
    ):
        program = rewrite(program)
    assert len(list(program.operations())) == before
