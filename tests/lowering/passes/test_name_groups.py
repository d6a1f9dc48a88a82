"""name_groups: collectives run over this rank's process groups."""

import pytest
import torch
from torch import nn

from stepgraph.lowering.passes.name_groups import name_groups
from stepgraph.program.collectives import is_collective, mesh_dim_of
from stepgraph.program.text import program_text
from tests.support import assert_golden_text, bound, compiled


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum()


@pytest.fixture
def program():
    return bound(compiled(Scaled(), torch.ones(2, 3), ranks=2).programs["step"])[0]


def groups(program):
    return {mesh_dim_of(node) for node in program.operations() if is_collective(node)}


def test_a_mesh_dimension_becomes_the_ranks_process_group(program):
    after = name_groups(program.copy(), {"dp": "group 7"})
    assert groups(program) == {"dp"} and groups(after) == {"group 7"}
    text = f"{program_text(program, 'before')}\n{program_text(after, 'after name_groups')}"
    assert_golden_text(__file__, "name_groups", text)


def test_a_dimension_without_a_group_keeps_its_name(program):
    assert str(name_groups(program.copy(), {})) == str(program)
