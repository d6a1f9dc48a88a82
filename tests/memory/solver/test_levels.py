"""Levels: the named policies, what lies between them, and nothing twice."""

from stepgraph.memory.solver.blocks import Blocks
from stepgraph.memory.solver.levels import TWICE, find_levels
from tests.memory.solver.search_support import (
    llama_program,
    llama_search,
    narrowing,
    placed,
    plan_on,
    stacks,
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
    program = placed(*stacks(), plan_on("ddp"))
    assert set(Blocks(program, False).kinds) == {0, 1}
    assert all(len(level.kept) == 2 for level in levels_of(program))


def test_names_say_what_is_kept():
    names = [level.name for level in llama_search().profile.levels]
    assert any(name.startswith("full but ") for name in names)
    assert not any("layers.0" in name.replace("layers.0/", "") for name in names)
