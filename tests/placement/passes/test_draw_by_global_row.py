"""Random operations under placement: each rank draws its own part of one global mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.program.program import FORWARD
from stepgraph.program.randomness import RANDOM
from tests.support import compiled


class Drops(nn.Module):
    """Masks over [batch, token, width], [token, batch, width], batch times tokens, and a weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = F.dropout(self.linear(x), 0.5)
        x = F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)
        x = F.dropout(x.reshape(-1, 6), 0.5).view(x.shape)
        return (x @ F.dropout(self.linear.weight, 0.5)).sum()


def drawn(ranks=2, micro_batches=1, plan="zero3", name="step"):
    made = compiled(
        Drops(), (torch.ones(8, 3, 6),), ranks=ranks, plan=plan, micro_batches=micro_batches
    )
    return [n.args[3:] for n in made.programs[name].operations() if n.target is RANDOM]


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_each_rank_draws_its_own_rows_and_every_rank_the_whole_weight(plan):
    assert drawn(plan=plan) == [
        ([4, 3, 6], [8, 3, 6], [0, 0, 0], [], "0:dp"),
        ([3, 4, 6], [3, 8, 6], [0, 0, 0], [], "1:dp"),
        ([12, 6], [24, 6], [0, 0], [], "0:dp"),
        ([6, 6], [6, 6], [0, 0], [], ""),
    ]


class BatchSecond(nn.Module):
    """Dropout over [token, batch, width], and a mask of columns that is counted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = F.dropout(self.linear(x).transpose(0, 1), 0.5)
        kept = (torch.rand(x.shape[:2]) < 0.5).float()
        return ((x.square().mean(2) * kept).transpose(0, 1).sum(1)).sum() / kept.sum()


def test_a_mask_is_drawn_where_it_is_read_though_other_dimensions_divide_too():
    program = compiled(BatchSecond(), (torch.ones(8, 4, 6),), ranks=2, plan="ddp").programs["step"]
    drawn = [n.args[3:] for n in program.operations() if n.target is RANDOM]
    assert drawn == [
        ([4, 4, 6], [4, 8, 6], [0, 0, 0], [], "1:dp"),
        ([4, 4], [4, 8], [0, 0], [], "1:dp"),
    ]
    forward = program.operations(FORWARD)
    assert not any("all_to_all" in str(node.target) for node in forward)


@pytest.mark.parametrize("name", ["accumulate", "step"])
def test_a_micro_batch_draws_the_rows_of_the_whole_batch_that_it_holds(name):
    assert drawn(micro_batches=5, name=name) == [
        ([4, 3, 6], [40, 3, 6], [0, 0, 0], [0, 1, 5, 1], "0:dp"),
        ([3, 4, 6], [3, 40, 6], [0, 0, 0], [1, 1, 5, 1], "1:dp"),
        ([12, 6], [120, 6], [0, 0], [0, 1, 5, 1], "0:dp"),
        ([6, 6], [6, 6], [0, 0], [], ""),
    ]
