"""Plan: the decisions as JSON, read back as they were written, or refused."""

import json

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph import pipeline
from stepgraph.capture.module import default_loss
from stepgraph.errors import PlanError
from stepgraph.pipeline import StepRequest, compile_step
from stepgraph.planning import file as planning
from stepgraph.planning.placements import parse_operation, parse_placements
from stepgraph.planning.plan import Plan
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import MeshShape, show
from stepgraph.runtime.ranks import parse_mesh
from tests.support import mlp, regression_batch, spec_of


def compile_with(plan):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    request = StepRequest(model, default_loss, spec_of(regression_batch()), plan, optimizer)
    return compile_step(request, PassDriver()).programs["step"]


@pytest.fixture(scope="module")
def plan():
    made = Plan("zero3", parse_mesh("dp=2"), memory="full", lowering="eager")
    compile_with(made)
    return made


def test_a_plan_is_read_back_as_it_was_written(plan, tmp_path):
    assert plan.placements and plan.recomputation
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()


def test_the_same_plan_is_the_same_text(plan, tmp_path):
    plan.save(tmp_path / "a.json")
    Plan.load(tmp_path / "a.json").save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_plan_that_is_replayed_decides_nothing_again(plan, monkeypatch):
    def refuse(*args, **named):
        raise AssertionError("decided again")

    expected = str(compile_with(Plan("zero3", parse_mesh("dp=2"), memory="full")))
    monkeypatch.setattr(pipeline, "decide_placement", refuse)
    monkeypatch.setattr(pipeline.memory_policies, "decide", refuse)
    replayed = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert str(compile_with(replayed)) == expected


def test_placements_that_cannot_be_carried_out_are_a_plan_error(plan):
    changed = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    changed.final = True
    operations = changed.placements["step"].operations
    name = next(name for name in operations if name.endswith("tanh"))
    operations[name] = parse_operation("P(avg) -> P(avg)")
    with pytest.raises(PlanError, match="cannot be carried out"):
        compile_with(changed)


def test_placements_that_no_tensor_has_are_a_plan_error_that_names_the_value(plan):
    for name, placements, message in (
        ("tanh", "S(2) -> S(2)", "there is no dimension 2"),
        ("tanh", "R R -> R", "1 tensor arguments and 1 results, the plan places 2 and 1"),
        ("tanh", "S(0/5) -> S(0)", "5 blocks do not divide"),
    ):
        changed = Plan.from_json(json.loads(json.dumps(plan.to_json())))
        changed.final = True
        operations = changed.placements["step"].operations
        name = next(key for key in operations if key.endswith(f"/{name}") or key == name)
        operations[name] = parse_operation(placements)
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
    "a field of another type": '{"version": 2, "mesh": 3, "placement": "zero3", "memory": "none",'
    ' "schedule": "none", "lowering": "eager", "placements": {}, "recomputation": {}}',
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
    (tmp_path / "plan.json").write_text(json.dumps(Plan("ddp", MeshShape((("dp", 1),))).to_json()))
    with pytest.raises(PlanError, match="larger than"):
        Plan.load(tmp_path / "plan.json")
