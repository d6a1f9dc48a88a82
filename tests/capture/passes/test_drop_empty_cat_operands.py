"""drop_empty_cat_operands: concatenations forget operands without elements."""

import pytest
import torch
from torch import nn

from stepgraph.capture.passes.drop_empty_cat_operands import drop_empty_cat_operands
from tests.support import assert_bitwise, assert_golden, captured, values

aten = torch.ops.aten


class Cached(nn.Module):
    """Concatenates ``kept`` cached rows, then its input, ``times`` times."""

    def __init__(self, kept=0, times=1, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.kept, self.times, self.dtype = kept, times, dtype

    def forward(self, x):
        cache = torch.zeros(2, self.kept, 3, dtype=self.dtype)
        return torch.cat([cache, *[x * self.weight] * self.times], 1).sum()


def cats(program):
    return [node for node in program.operations() if node.target is aten.cat.default]


def test_a_concatenation_with_nothing_disappears():
    program = captured(Cached(), torch.ones(2, 4, 3))
    after = drop_empty_cat_operands(program.copy())
    assert cats(program) and not cats(after)
    assert_golden(__file__, "drop_empty_cat_operands", program, after)


def test_a_concatenation_keeps_its_other_operands():
    (cat,) = cats(drop_empty_cat_operands(captured(Cached(times=2), torch.ones(2, 4, 3))))
    assert len(cat.args[0]) == 2


def test_operands_with_elements_stay():
    program = captured(Cached(kept=1), torch.ones(2, 4, 3))
    assert str(drop_empty_cat_operands(program.copy())) == str(program)


def test_an_empty_operand_that_decides_the_dtype_stays():
    program = captured(Cached(dtype=torch.float64), torch.ones(2, 4, 3))
    assert len(cats(drop_empty_cat_operands(program.copy()))) == len(cats(program))


def test_an_operand_that_lies_otherwise_is_still_copied():
    """A view of the result, in its order of memory, is none of the operand (Bloom's keys)."""

    class Turned(Cached):
        def forward(self, x):
            cache = torch.zeros(4, 0, 3)
            return torch.cat([cache, (x * self.weight).transpose(0, 1)], 1).view(-1, 3).sum()

    program = captured(Turned(), torch.ones(2, 4, 3))
    after = drop_empty_cat_operands(program.copy())
    assert [len(cat.args[0]) for cat in cats(after)] == [1]
    inputs = values(Turned(), torch.ones(2, 4, 3))
    assert_bitwise(inputs.execute(program), inputs.execute(after))


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_every_result_is_the_same_bits(kept, times):
    model, batch = Cached(kept, times), torch.rand(2, 4, 3)
    program = captured(model, batch)
    inputs = values(model, batch)
    assert_bitwise(inputs.execute(program), inputs.execute(drop_empty_cat_operands(program.copy())))
