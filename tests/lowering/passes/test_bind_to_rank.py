"""bind_to_rank: one program for all becomes every rank's own."""

import pytest
import torch
from torch import nn

from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.program.collectives import SHARD_OF
from stepgraph.program.invariants import check_invariants
from tests.support import (
    RANKS,
    adamw,
    assert_bitwise,
    assert_golden,
    bound,
    compiled,
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


def test_a_cut_becomes_a_slice_at_the_ranks_position():
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = compiled(model, torch.ones(2, 3), optimizer, ranks=2, plan="zero1").programs["step"]
    assert any(node.target is SHARD_OF for node in program.operations())
    after = bind_to_rank(program.copy(), 1)
    assert not any(node.target is SHARD_OF for node in after.operations())
    assert_golden(__file__, "bind_to_rank", program, after)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_every_rank_computes_its_part_bit_for_bit(plan, ranks):
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    program = compiled(model, batch, optimizer, ranks=ranks, plan=plan).programs["step"]
    programs = bound(program)
    for each in programs:
        check_invariants(each, "bind_to_rank")
    inputs = values(model, batch, optimizer)
    assert_bitwise(inputs.execute(program), inputs.execute(programs))
