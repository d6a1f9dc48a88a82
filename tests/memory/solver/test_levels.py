"""Levels: the named policies, what lies between them, and nothing twice."""

import torch
from torch import nn

from stepgraph.memory.solver.blocks import Blocks
from stepgraph.memory.solver.levels import TWICE, find_levels
from tests.memory.solver.search_support import (
    llama_program,
    llama_search,
    narrowing,
    placed,
    plan_on,
)


def levels_of(program):
    blocks = Blocks(program, gather_again=True)
    return find_levels(blocks, dict.fromkeys(blocks.nodes, 1.0))


def test_all_is_kept_by_the_first_and_named_policies_are_there():
    found = levels_of(llama_program())
    names = [level.name for level in found]
    assert names[:3] == ["none", "full", "ops"] and len(set(names)) == len(names)
    costs = list(found.values())
    assert costs[0].seconds == (0.0,) and costs[1].bytes < costs[2].bytes < costs[0].bytes


def test_levels_differ_in_what_they_cost_or_in_what_they_compute():
    found = levels_of(llama_program())
    assert len({(level.kept, level.gathered, level.communicates) for level in found}) == len(found)


def test_where_nothing_is_communicated_nothing_is_communicated_twice():
    assert TWICE not in {level.name for level in levels_of(llama_program())}
    program = llama_program(preset="tp+zero3", mesh="dp=2,tp=2")
    twice = next(level for level in levels_of(program) if level.name == TWICE)
    assert twice.communicates


def test_of_a_few_values_every_set_is_a_level():
    program = placed(*narrowing(), plan_on("ddp"))
    found = levels_of(program)
    blocks = Blocks(program, gather_again=False)
    (kept,) = zip(*(level.kept for level in found), strict=True)
    recomputed = {tuple(blocks.dropped(0, one)) for one in kept if one is not None}
    assert len(recomputed) == len(found) - 1 >= 10


def test_blocks_of_several_kinds_have_levels_in_common():
    class Layer(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    class Stacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.ModuleList(Layer(32) for _ in range(3))
            self.narrow = nn.ModuleList(Layer(16) for _ in range(3))

        def forward(self, x):
            for layer in [*self.wide, *self.narrow]:
                x = layer(x)
            return x.square().mean()

    program = placed(Stacks(), (torch.randn(8, 8),), plan_on("ddp"))
    assert set(Blocks(program, False).kinds) == {0, 1}
    assert all(len(level.kept) == 2 for level in levels_of(program))


def test_names_say_what_is_kept():
    names = [level.name for level in llama_search().profile.levels]
    assert any(name.startswith("full but ") for name in names)
    assert not any("layers.0" in name.replace("layers.0/", "") for name in names)
