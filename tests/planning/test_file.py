"""Plan files are not trusted: whatever is in one, the answer is a plan or a PlanError."""

import copy
import dataclasses
import json
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.api.plan import Plan
from stepgraph.cost.correction import Correction
from stepgraph.errors import PlanError
from stepgraph.planning import reading
from stepgraph.planning.decisions import Reason
from tests.planning.plan_support import llama_plan, placed_otherwise, with_reason
from tests.support import tiny_llama


@pytest.fixture(scope="module")
def written():
    return json.loads(json.dumps(llama_plan().to_json()))


def test_a_plan_with_everything_is_read_back(tmp_path):
    plan = with_reason(llama_plan(), "lm_head/mm", Reason("S(0)R", 0.25))
    assert all(vars(plan.decisions["step"]).values()) and plan.values and plan.predicted
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.reasons == plan.reasons and loaded.final


OTHERWISE = {
    "placement": {
        "unruled": {"lm_head/mm": "aten.mm"},
        "batch_dims": {"lm_head/mm": (0, 1)},
        "optimality_gap": 0.25,
        "held_bytes": 7,
        "views_apart": True,
    },
    "memory": {
        "recompute": {"lm_head/mm": 3},
        "reason": "it fits",
        "pieces": {"lm_head/mm": 8},
        "offload": ("layers.0/a", "layers.1/a", "lm_head/mm"),
    },
    "schedule": {
        "buckets": (("a", "b"),),
        "updates": {"layers.0/a": "layers.0/b"},
        "waits": {"layers.0/a": "layers.1/b"},
    },
    "lowering": {"reason": "another cannot"},
}
IN_EVERY_PLAN = {"preset", "policy", "name", "notes", "inputs", "outputs", "operations", "reasons"}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_every_field_of_a_decision_is_in_the_file(tmp_path, kind):
    plan = llama_plan()
    decided = plan.decisions["step"]
    first = getattr(decided, kind)
    named = {field.name for field in dataclasses.fields(first)}
    assert named - IN_EVERY_PLAN == set(OTHERWISE[kind])
    changed = dict(OTHERWISE[kind], **({"notes": ("a note",)} if "notes" in named else {}))
    for name, value in changed.items():
        other = dataclasses.replace(decided, **{kind: dataclasses.replace(first, **{name: value})})
        then = dataclasses.replace(plan, decisions={**plan.decisions, "step": other})
        assert then != plan, name
        then.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == then, name


def test_a_correction_is_in_the_file_and_in_words(tmp_path):
    plan = llama_plan()
    correction = Correction(compute=2.0, communication=0.5, memory=1.25)
    then = dataclasses.replace(
        plan, request=dataclasses.replace(plan.request, correction=correction)
    )
    then.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == then and loaded.request.known == correction
    told = "compute x 2, communication x 0.5, memory x 1.25"
    assert plan.diff(then) == f"correction: None -> {told}"
    assert f"corrected: {told}" in then.request.show()
    assert pickle.loads(pickle.dumps(then)) == then == copy.deepcopy(then)
    # Decided for other costs, everything would be decided otherwise.
    assert not plan.under(correction=correction).decisions


def test_a_file_of_before_corrections_is_read(written):
    data = copy.deepcopy(written)
    assert data["request"].pop("correction") is None
    assert Plan.from_json(data).request.correction is None


def test_layers_share_entries(tmp_path):
    sizes = []
    for layers in (2, 8):
        plan = llama_plan()
        found = plan.decisions["step"].placement
        for kind in ("inputs", "operations", "outputs"):
            more = {
                name.replace("layers.1.", f"layers.{i}."): value
                for name, value in getattr(found, kind).items()
                for i in range(2, layers)
                if "layers.1." in name
            }
            plan = placed_otherwise(plan, **{kind: {**getattr(found, kind), **more}})
        written = plan.to_json()["decisions"]["step"]["placement"]
        sizes.append(len(json.dumps(written)))
    assert sizes[1] < 1.05 * sizes[0]


def changed(data, path, value):
    data = copy.deepcopy(data)
    *steps, last = path
    inner = data
    for step in steps:
        inner = inner[step]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return data


STEP = ("decisions", "step", "placement")
MEMORY = ("decisions", "step", "memory")
SCHEDULE = ("decisions", "step", "schedule")
BAD = {
    "no mesh": (("request", "mesh"), KeyError, "mesh"),
    "a mesh of no dimension": (("request", "mesh"), [], "a list of length >= 1, not 0 elements"),
    "a negative mesh size": (("request", "mesh", 0, 1), -2, "a whole number >= 1, not -2"),
    "a mesh size of zero": (("request", "mesh", 0, 1), 0, "a whole number >= 1, not 0"),
    "an absurd mesh size": (("request", "mesh", 0, 1), 10**12, "a whole number <= 1048576"),
    "an absurd world size": (("request", "mesh"), [["dp", 2**15], ["tp", 2**15]], "more than"),
    "a mesh size of 200 digits": (("request", "mesh", 0, 1), 10**200, "more than 63 bits"),
    "a fractional mesh size": (("request", "mesh", 0, 1), 2.5, "a whole number"),
    "a mesh size that is true": (("request", "mesh", 0, 1), True, "a whole number"),
    "a mesh dimension without a name": (("request", "mesh", 0, 0), "", "no name"),
    "a mesh dimension without a role": (
        ("request", "mesh", 0, 0),
        "cp",
        "nobody knows the role of a mesh dimension 'cp'",
    ),
    "a mesh dimension twice": (("request", "mesh"), [["dp", 2], ["dp", 2]], "twice"),
    "many mesh dimensions": (("request", "mesh"), [[f"d{i}", 1] for i in range(99)], "length <= 8"),
    "a policy of another type": (("request", "memory"), 7, "a text"),
    "no request": (("request",), KeyError, "request"),
    "no decisions": (("decisions",), KeyError, "decisions"),
    "decisions as a list": (("decisions",), [], "an object"),
    "no placements": (STEP, KeyError, "placement"),
    "placements as a list": (STEP, [], "an object"),
    "an unknown placement": ((*STEP, "inputs"), {"X(0)R": {"": ["a"]}}, "unknown placement"),
    "a negative dimension": ((*STEP, "inputs"), {"S(-1)R": {"": ["a"]}}, "unknown placement"),
    "dimension 99": ((*STEP, "inputs"), {"S(99)R": {"": ["a"]}}, "no tensor has 99"),
    "an unknown reduction": ((*STEP, "inputs"), {"P(xor)R": {"": ["a"]}}, "no such reduction"),
    "one block": ((*STEP, "inputs"), {"S(0/1)R": {"": ["a"]}}, "two blocks"),
    "too few placements": ((*STEP, "inputs"), {"R": {"": ["a"]}}, "1 placements"),
    "too many placements": ((*STEP, "inputs"), {"R" * 99: {"": ["a"]}}, "99 placements"),
    "a name twice": ((*STEP, "inputs"), {"RR": {"": ["a"]}, "RS(0)": {"": ["a"]}}, "twice"),
    "no arrow": ((*STEP, "operations"), {"RR RR": {"": ["a"]}}, "look like"),
    "layers in words": ((*STEP, "inputs"), {"RR": {"all": ["a.*"]}}, "not understood"),
    "offloaded layers in words": ((*MEMORY, "offload"), {"all": ["a.*"]}, "not understood"),
    "no place for the layer": ((*STEP, "inputs"), {"RR": {"0-1": ["a"]}}, "number stands"),
    "a billion names": ((*STEP, "inputs"), {"RR": {"0-999999": ["a.*.b"] * 999}}, "names"),
    "names of another type": ((*STEP, "inputs"), {"RR": {"": [7]}}, "a text"),
    "a reason of words": ((*STEP, "reasons"), [["R", "cheap", None, None, {}]], "a number"),
    "a negative block": ((*MEMORY, "recompute"), {"-7": ["a"]}, "-7 is not between"),
    "a block in words": ((*MEMORY, "recompute"), {"x": ["a"]}, "number of a"),
    "a bucket of words": ((*SCHEDULE, "buckets"), ["a"], "a list"),
    "waits in a list": ((*SCHEDULE, "waits"), [], "an object"),
    "a lowering of a number": (("decisions", "step", "lowering", "name"), 7, "a text"),
    "no micro-batch": (("request", "step", "micro_batches"), 0, ">= 1, not 0"),
    "clipping in words": (("request", "step", "clip"), "yes", "true or false"),
    "a type of integers": (
        ("request", "step", "precision", "compute"),
        "int8",
        "no floating-point type",
    ),
    "a negative shape": (
        ("fingerprint", "parameters", "w"),
        "float32[-4, 2]",
        "a type with a shape",
    ),
    "an absurd shape": (
        ("fingerprint", "parameters", "w"),
        f"float32[{10**30}]",
        "a type with a shape",
    ),
    "a batch without shape": (("request", "batch", "x"), "int64", "a type with a shape"),
    "a correction by nothing": (("request", "correction"), {"compute": 0.0}, "> 0"),
    "a negative correction": (("request", "correction"), {"memory": -2.0}, "> 0"),
    "a correction in words": (("request", "correction"), "twice", "an object"),
    "a negative budget": (("request", "memory_budget"), -1, ">= 1, not -1"),
    "negative memory": (("predicted", "peak_bytes"), -1, ">= 0, not -1"),
    "memory in words": (("predicted", "peak_bytes"), "much", "whole number"),
    "no time": (("predicted", "step_ms"), None, "a number"),
    "a prediction with more fields": (("predicted", "more"), 1, "unknown field `more`"),
    "a deep prediction": (("predicted", "device"), [[[[[[[[1]]]]]]]], "a text, got a list"),
    "collectives of nothing": (
        ("predicted", "collectives"),
        {"x": {"count": 1, "bytes": 1}},
        "phase/kind",
    ),
    "a long text": (("notes",), ["x" * 10**5], "length <= 4096"),
    "readers that are none": (
        ("values", "step"),
        [["f[2]", [["R", "x"]], [], {}]],
        "names of readers",
    ),
    "a field that is not known": (("request", "more"), 1, "unknown field `more`"),
    "an unknown field deep inside": ((*SCHEDULE, "more"), 1, "unknown field `more`"),
    "facts without names": (
        ("values", "step"),
        [["f[2]", [], []]],
        "a list of length 4, got 3",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data_is_a_plan_error_that_says_where(written, tmp_path, what):
    path, value, message = BAD[what]
    (tmp_path / "plan.json").write_text(json.dumps(changed(written, path, value)))
    with pytest.raises(PlanError, match="plan.json is not a plan file") as caught:
        Plan.load(tmp_path / "plan.json")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(written, tmp_path, number):
    data = changed(written, ("predicted", "step_ms"), 12345.5)
    text = json.dumps(data).replace("12345.5", number)
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="is not a plan file"):
        Plan.load(tmp_path / "plan.json")


def test_a_gigabyte_is_refused_at_once(tmp_path):
    path = tmp_path / "plan.json"
    with path.open("wb") as stream:
        stream.truncate(2**30)  # takes no room on the disk
    start = time.perf_counter()
    with pytest.raises(PlanError, match="larger than 64 MiB"):
        Plan.load(path)
    assert time.perf_counter() - start < 0.1


def test_a_file_that_grows_while_it_is_read_is_still_bounded(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text("[" + "1," * 100 + "1]")
    monkeypatch.setattr(reading, "LARGEST_FILE", 50)
    with pytest.raises(PlanError, match="is not a plan file"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("version", [0, 1, 2, 3, 99])
def test_another_schema_version_is_said_to_be_one(written, tmp_path, version):
    (tmp_path / "plan.json").write_text(json.dumps(written | {"version": version}))
    with pytest.raises(PlanError, match=f"plan version {version} cannot be read, only 4"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_of_the_version_before_says_what_to_do(written, tmp_path):
    before = {"version": 2, "mesh": [["dp", 2]], "placements": {}}  # of other fields than today's
    (tmp_path / "plan.json").write_text(json.dumps(before))
    with pytest.raises(PlanError, match="plan version 2 cannot be read, only 4") as caught:
        Plan.load(tmp_path / "plan.json")
    assert "make the plan again with this version of stepgraph" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("request", "mesh", 1, 1), 0, "request.mesh.1.1"),
        (("request", "batch", "input_ids"), "int64", "request.batch.input_ids"),
        ((*STEP, "inputs"), {"RR": {"": [], "0-1": ["a.*", 7]}}, "inputs.RR.0-1.1"),
        ((*STEP, "inputs"), {"RR": {"": ["a"]}, "X": {"": ["b"]}}, "placement.inputs.X"),
        ((*SCHEDULE, "waits"), {"a": {"": ["b"]}, "c": {"": 5}}, "step.schedule.waits.c"),
        (("values", "step", 7, 0), 5, "values.step.7.0"),
        ((*STEP, "more"), 5, "decisions.step.placement"),
    ],
)
def test_the_place_is_found_among_thousands(written, path, value, where):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(changed(written, path, value))
    assert where in caught.value.where


def test_every_truncation_is_an_error(written, tmp_path):
    text = json.dumps(written)
    for share in (0.01, 0.3, 0.7, 0.999):
        (tmp_path / "plan.json").write_text(text[: int(len(text) * share)])
        with pytest.raises(PlanError, match="is not a plan file"):
            Plan.load(tmp_path / "plan.json")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
)


@settings(max_examples=100)
@given(st.data(), ANYTHING)
def test_anything_anywhere_is_a_plan_or_a_plan_error(written, data, value):
    inner = written
    path = []
    while isinstance(inner, (dict, list)) and inner:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        path.append(data.draw(st.sampled_from(keys)))
        inner = inner[path[-1]]
        if data.draw(st.booleans()):
            break
    try:
        Plan.from_json(changed(written, path, value))
    except PlanError as error:
        assert len(str(error)) < 1000


def test_a_plan_of_another_model_says_what_differs(tmp_path):
    llama_plan().save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    plan.check_model(tiny_llama(2))
    with pytest.raises(PlanError, match="the plan does not know parameters: model.layers.2"):
        plan.check_model(tiny_llama(3))
