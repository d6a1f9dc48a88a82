"""Plan: the decisions as JSON, read back as they were written, or refused."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph import pipeline
from stepgraph.api.plan import Plan, public
from stepgraph.errors import PlanError
from stepgraph.planning import file as planning
from stepgraph.planning.placements import parse_operation, parse_placements
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.program.layout import MeshShape, show
from stepgraph.runtime.ranks import parse_mesh
from tests.planning.plan_support import placed_otherwise
from tests.support import mlp, programs_of, regression_batch


def compile_with(plan):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return programs_of(model, regression_batch(), plan, optimizer)


def preset():
    step = StepSettings("sgd")
    return preset_plan("zero3", parse_mesh("dp=2"), memory="full", lowering="eager", step=step)


def read_back(plan):
    return Plan.from_json(json.loads(json.dumps(plan.to_json())))


@pytest.fixture(scope="module")
def plan():
    return public(compile_with(preset()).plan)


def test_a_plan_is_read_back_as_it_was_written(plan, tmp_path):
    assert all(vars(plan.decisions["step"]).values())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()


def test_the_same_plan_is_the_same_text(plan, tmp_path):
    plan.save(tmp_path / "a.json")
    Plan.load(tmp_path / "a.json").save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_numbers_of_other_libraries_are_written_as_numbers(plan):
    class Seed(int):
        pass

    step = replace(plan.request.step, seed=Seed(3))
    given = placed_otherwise(plan.under(step=step), optimality_gap=numpy.float64(0.25))
    found = read_back(given)
    assert found.request.step.seed == 3
    assert found.decisions["step"].placement.optimality_gap == 0.25


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_none_does_not_become_another(plan, number):
    with pytest.raises(PlanError, match="optimality_gap"):
        read_back(placed_otherwise(plan, optimality_gap=number))


def test_a_plan_that_is_replayed_decides_nothing_again(plan, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("decided again")

    expected = str(compile_with(preset()).programs["step"])
    for room in ("placement", "memory", "lowering"):
        monkeypatch.setattr(pipeline, f"decide_{room}", refuse)
    monkeypatch.setattr(pipeline.schedule, "decide_and_apply", refuse)
    made = compile_with(read_back(plan))
    assert str(made.programs["step"]) == expected
    assert made.plan.decisions == plan.decisions


def test_a_plan_is_a_value(plan):
    decided = plan.decisions["step"]
    for held in (plan, plan.request, plan.request.step, *vars(decided).values()):
        with pytest.raises(FrozenInstanceError):
            setattr(held, next(iter(vars(held))), None)
    for table in (plan.decisions, decided.placement.operations, decided.memory.recompute):
        with pytest.raises(TypeError, match="a decision is a value"):
            table["step"] = None
    for same in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert same == plan and type(same) is type(plan)


def changed_by_hand(plan, operation, placements):
    """A final plan that was read from a file, with other placements for one operation."""
    operations = plan.decisions["step"].placement.operations
    name = next(key for key in operations if key.endswith(f"/{operation}") or key == operation)
    operations = {**operations, name: parse_operation(placements)}
    return replace(placed_otherwise(read_back(plan), operations=operations), final=True)


def test_placements_that_cannot_be_carried_out_are_a_plan_error(plan):
    changed = changed_by_hand(plan, "tanh", "P(avg) -> P(avg)")
    with pytest.raises(PlanError, match="cannot be carried out"):
        compile_with(changed)


def test_placements_that_no_tensor_has_are_a_plan_error_that_names_the_value(plan):
    for name, placements, message in (
        ("tanh", "S(2) -> S(2)", "there is no dimension 2"),
        ("tanh", "R R -> R", "1 tensor arguments and 1 results, the plan places 2 and 1"),
        ("tanh", "S(0/5) -> S(0)", "5 blocks do not divide"),
    ):
        changed = changed_by_hand(plan, name, placements)
        with pytest.raises(PlanError, match="tanh") as caught:
            compile_with(changed)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(),),
        (Shard(0), Replicate()),
        (Partial(), Shard(11)),
        (Partial("avg"), Partial("max")),
    ],
)
def test_placements_are_read_back_as_they_are_shown(placements):
    assert parse_placements(show(placements)) == placements


def test_unknown_placements_are_an_error():
    with pytest.raises(ValueError, match="unknown placement"):
        parse_placements("RX")


MALFORMED = {
    "nothing": "",
    "no JSON": "{",
    "truncated": None,
    "a list": "[]",
    "a number": "7",
    "no fields": "{}",
    "a field of another type": '{"version": 4, "request": {"mesh": 3, "placement": "zero3",'
    ' "memory": "none", "schedule": "none", "lowering": "eager"}, "decisions": {}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_file_is_a_plan_error_that_names_it(plan, tmp_path, what):
    text = MALFORMED[what]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json())[:-40] if text is None else text)
    with pytest.raises(PlanError, match="plan.json is not a plan file"):
        Plan.load(path)


def test_bytes_that_are_no_text_are_a_plan_error(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_another_version_is_named(plan, tmp_path):
    data = plan.to_json() | {"version": 99}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="version 99"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_is_no_file_is_named(tmp_path, name):
    with pytest.raises(PlanError, match="there is no plan file"):
        Plan.load(tmp_path / name)


def test_a_file_too_large_to_be_a_plan_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LARGEST_FILE", 10)
    public(preset_plan("ddp", MeshShape((("dp", 1),)))).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="larger than"):
        Plan.load(tmp_path / "plan.json")
