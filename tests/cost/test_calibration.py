"""The calibration file: what was written is read, and what is damaged is refused."""

import json

import pytest
import torch

from stepgraph.cost import calibration
from stepgraph.cost.calibration import HOST, UNCALIBRATED, VARIABLE, machine, to_json
from stepgraph.cost.device import Link
from stepgraph.cost.devices import find_device
from stepgraph.errors import UsageError
from tests.cost.hand_made import round_device


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def good(file):
    device = round_device(
        name=HOST,
        families={"attention": 0.5},
        elements={"exp": 1e-9},
        caches=((1e3, 1e10), (1e5, 1e8)),
        collectives={"all_gather": Link(1e-4, 1e9)},
        crowding=1.25,
        overlaps=False,
        source="here",
        error="10 %",
    )
    file.write_text(to_json({HOST: device}))
    return device


def test_what_was_written_is_read(good):
    assert find_device(HOST) == good
    assert calibration.machine_names() == [HOST]


def test_without_a_file_the_host_has_rough_numbers_that_say_so(file):
    assert find_device(HOST) is UNCALIBRATED
    assert "doctor --calibrate" in UNCALIBRATED.error
    assert machine("cuda") is None


def test_the_file_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.calibration_file() == tmp_path / "stepgraph" / "machine.json"


def test_another_device_of_this_machine_has_its_own_numbers(file):
    file.write_text(to_json({"cuda": round_device(name="cuda")}))
    assert find_device("cuda").memory_bandwidth == 1e9
    assert find_device(HOST) is UNCALIBRATED


DAMAGE = {
    "not JSON": lambda data: "{",
    "not an object": lambda data: "[]",
    "deep": lambda data: "[" * 100_000,
    "large": lambda data: json.dumps(data) + " " * 2**21,
    "no devices": lambda data: json.dumps({"version": 1}),
    "another version": lambda data: json.dumps(data | {"version": 7}),
    "a device that is a list": lambda data: json.dumps({"version": 1, "devices": {HOST: []}}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_with_its_name(damage, file, good):
    file.write_text(DAMAGE[damage](json.loads(file.read_text())))
    with pytest.raises(UsageError, match=r"machine\.json.* cannot be used") as error:
        find_device(HOST)
    assert "doctor --calibrate" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bandwidth", -1.0),
        ("memory_bandwidth", 0),
        ("memory_bandwidth", "fast"),
        ("memory_bandwidth", True),
        ("memory_bandwidth", None),
        ("memory_bandwidth", float("nan")),
        ("capacity", float("inf")),
        ("capacity", 1e300),
        ("crowding", 0),
        ("ranks_per_node", 0.5),
        ("half_flops", -1),
        ("dispatch_seconds", -1e-6),
        ("overlaps", 1),
        ("error", 5),
        ("matmul", {}),
        ("matmul", {"bfloat16": 1.0}),
        ("matmul", {"float32": 1.0, "float7": 1.0}),
        ("matmul", {"float32": -1.0}),
        ("intra", {"latency": 1.0}),
        ("intra", []),
        ("elements", {"exp": -1.0}),
        ("caches", [[1.0]]),
        ("caches", [[2.0, 1.0], [1.0, 1.0]]),
        ("caches", "none"),
        ("collectives", {"all_gather": 5}),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field, value, file, good):
    data = json.loads(file.read_text())
    data["devices"][HOST][field] = value
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="cannot be used") as error:
        find_device(HOST)
    nested = field == "collectives"  # the kind of collective is named
    assert ("all_gather" if nested else field) in str(error.value)


def test_a_missing_field_is_named(file, good):
    data = json.loads(file.read_text())
    del data["devices"][HOST]["caches"]
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="caches"):
        find_device(HOST)


def test_a_folder_in_its_place_is_refused(file):
    file.mkdir()
    with pytest.raises(UsageError, match="not a file"):
        find_device(HOST)


def test_types_keep_their_names(good, file):
    data = json.loads(file.read_text())["devices"][HOST]
    assert data["matmul"] == {"float32": 1e12, "bfloat16": 4e12}
    assert find_device(HOST).matmul[torch.bfloat16] == 4e12
