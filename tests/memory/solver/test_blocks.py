"""Levels mean the same in every block; the named policies are levels."""

import pytest

from stepgraph.memory.by_policy import decide_by_policy, gathered_values
from stepgraph.memory.solver.blocks import Blocks, Level
from stepgraph.program.metadata import meta
from tests.memory.solver.search_support import (
    llama_program,
    llama_search,
    narrowing,
    placed,
    plan_on,
    stacks,
)
from tests.sampling import sampled

NONE, FULL = Level("none", (None,)), Level("full", (frozenset(),))


@pytest.mark.parametrize("policy", sampled(["ops", "none", "full"]))
def test_a_named_policy_is_a_level_of_all_blocks(policy):
    search = llama_search()
    number = next(i for i, level in enumerate(search.profile.levels) if level.name == policy)
    found = search.profile.decision(policy, search.profile.uniform(number))
    assert dict(found.recompute) == dict(decide_by_policy(llama_program(), policy).recompute)


def test_every_second_block_is_layers_2():
    blocks = Blocks(llama_program(), gather_again=True)
    found = blocks.decision("", [NONE, FULL, NONE])
    assert found.recompute.keys() == decide_by_policy(llama_program(), "layers:2").recompute.keys()


def test_parameters_that_are_gathered_once_are_kept():
    program = llama_program()
    blocks = Blocks(program, gather_again=True)
    assert blocks.gathers and blocks.gathered_bytes(0) > 0
    once = Level("none", (None,), gathered=True)
    kept = blocks.decision("", [NONE] * 3).recompute.keys()
    kept -= blocks.decision("", [once, NONE, NONE]).recompute.keys()
    inside = {meta(node)["name"] for node in blocks.blocks[0]}
    assert kept == inside & {*gathered_values(program, True)}


def test_what_is_communicated_twice_is_kept_otherwise():
    program = llama_program(preset="tp+zero3", mesh="dp=2,tp=2")
    blocks = Blocks(program, gather_again=True)
    again = {*blocks.dropped(0, frozenset(), communicates=True)} - {*blocks.dropped(0, frozenset())}
    assert any("all_reduce" in name for name in again)
    assert not again & {*gathered_values(program, True)}


def test_where_nothing_repeats_the_forward_is_one_block():
    program = placed(*narrowing(), plan_on("ddp"))
    blocks = Blocks(program, gather_again=False)
    assert [len(block) for block in blocks.blocks] == [len(blocks.nodes)] and not blocks.gathers


def test_what_the_code_checkpoints_itself_is_another_kind():
    program = placed(*stacks(own=(0, 4)), plan_on("ddp"))
    assert Blocks(program, gather_again=False).kinds == [0, 1, 2, 3, 2]


def test_blocks_may_be_named():
    program = llama_program()
    names = Blocks(program, gather_again=True).names
    blocks = Blocks(program, True, [names[2], ["of another program"], names[0]])
    assert blocks.names == [names[2], names[0]] and blocks.kinds == [0, 0]
