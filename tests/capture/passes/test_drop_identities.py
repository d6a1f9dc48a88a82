"""drop_identities: detach and alias are read through."""

import torch
from torch import nn

from stepgraph.capture.passes.drop_identities import drop_identities
from tests.support import assert_bitwise, assert_golden, captured, mlp, regression_batch, values

aten = torch.ops.aten
IDENTITIES = {aten.detach.default, aten.alias.default}


class Softmax(nn.Module):
    """Its backward reads a detached copy of its result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = torch.softmax(x * self.weight, -1)
        return (y * y.detach()).sum()


def count(program):
    return sum(node.target in IDENTITIES for node in program.operations())


def test_the_program_reads_what_the_identities_were_taken_of():
    program = captured(Softmax(), torch.ones(2, 3))
    assert count(program)
    after = drop_identities(program.copy())
    assert not count(after)
    assert_golden(__file__, "drop_identities", program, after)


def test_every_result_is_the_same_bits():
    for model, batch in ((Softmax(), torch.rand(4, 3)), (mlp(), regression_batch())):
        program = captured(model, batch)
        inputs = values(model, batch)
        assert_bitwise(inputs.execute(program), inputs.execute(drop_identities(program.copy())))


def test_an_identity_that_is_a_result_gives_way_to_its_source():
    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).detach()

    program = captured(Forward(), torch.ones(2, 3), training=False)
    after = drop_identities(program.copy())
    assert not count(after)
    inputs = values(Forward(), torch.rand(2, 3))
    assert_bitwise(inputs.execute(program), inputs.execute(after))
