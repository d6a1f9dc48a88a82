import copy

from stepgraph.planning.decisions import OperationPlacement
from stepgraph.planning.placements import parse_placements
from tests.planning.plan_support import llama_plan, placed_otherwise


def test_a_plan_does_not_differ_from_itself():
    assert llama_plan().diff(copy.deepcopy(llama_plan())) == ""


def test_what_differs_is_said_by_group():
    mine, other = llama_plan(), llama_plan(placement="tp+ddp", memory="none")
    lines = mine.diff(other).splitlines()
    assert lines[:2] == ["placement: tp+zero3 -> tp+ddp", "memory: full -> none"]
    assert "step parameters: 21 differ" in lines
    assert "step optimizer state: 42 differ" in lines
    assert any("  S(1)S(0) => RS(0): Param(model.layers.*.mlp" in line for line in lines)
    assert any(line.startswith("step: ") and "no longer recomputed" in line for line in lines)
    assert lines[-1].startswith("predicted: step ")
    assert len(lines) < 40 and max(map(len, lines)) < 240


def test_one_changed_value_is_found_among_all():
    mine = llama_plan()
    name = "model.layers.1.mlp.up_proj/mm"
    operations = mine.decisions["step"].placement.operations
    replicated = parse_placements("RR")
    there = OperationPlacement((replicated,) * len(operations[name].inputs), (replicated,))
    other = placed_otherwise(mine, operations={**operations, name: there})
    lines = mine.diff(other).splitlines()
    assert lines[0] == "step operations: 1 differ"
    assert lines[1].endswith("=> RR RR -> RR: model.layers.*.mlp.up_proj/mm [1]")
    assert len(lines) == 2
