"""doctor --calibrate: what it fits, what it writes, and (slow) a whole run."""

import json

import pytest
import torch
from click.testing import CliRunner

from stepgraph.cli import calibrate
from stepgraph.cli import main as cli
from stepgraph.cli.calibrate import fit_line
from stepgraph.cli.timing import Timer
from stepgraph.cost.calibration import HOST, VARIABLE
from stepgraph.cost.devices import find_device
from tests.cost.hand_made import round_device


def test_a_line_is_found_through_sizes_of_every_order():
    rows = [(10.0**n, 1e-4 + 10.0**n / 1e9) for n in range(3, 10)]
    constant, slope = fit_line(rows)
    assert constant == pytest.approx(1e-4) and slope == pytest.approx(1e-9)


@pytest.mark.parametrize(
    "rows",
    [
        [(1e3, 1e-3), (1e6, 1.1e-3), (1e9, 1e-3)],
        [(1e3, 1e-9), (1e6, 1e-6), (1e9, 1e-3), (1e10, 1.1e-2)],
        [(1e3, 1.0), (1e9, 0.5)],
    ],
)
def test_noise_never_gives_a_rate_that_is_not_positive(rows):
    constant, slope = fit_line(rows)
    assert constant > 0 and slope > 0


def test_a_machine_that_is_slow_for_a_while_is_slow_for_all_that_is_compared():
    works, calls = {"one": lambda: 1e-3, "two": lambda: 2e-3, "three": lambda: 3e-3}, []

    class Busy(Timer):
        def once(self, call):
            calls.append(call)
            busy = 60 < len(calls) <= 120  # a third of the time
            stopped = 0.5 if len(calls) % 60 == 17 else 0.0
            return call() * (4 if busy else 1) + stopped

    found = Busy(torch.device(HOST)).in_turns(works, 60)
    assert found["two"] / found["one"] == pytest.approx(2, rel=0.1)
    assert found["three"] / found["one"] == pytest.approx(3, rel=0.1)
    assert 1e-3 < found["one"] < 3e-3


def test_a_timer_gives_operands_in_turn():
    timer, seen = Timer(torch.device(HOST)), []
    operands = timer.operands(4)
    assert timer.usual(lambda x: seen.append(id(x)), operands, seconds=0.0) > 0
    assert set(seen) == {id(tensor) for tensor in operands}


def test_the_command_writes_the_file_that_predictions_read(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "machine.json"
    monkeypatch.setenv(VARIABLE, str(path))
    device = round_device(name=HOST)

    def measure(where, progress):
        progress("nothing")
        return device

    monkeypatch.setattr(calibrate, "measure", measure)
    result = CliRunner().invoke(cli.main, ["doctor", "--calibrate"])
    assert result.exit_code == 0, result.output
    assert str(path) in result.stdout and "measuring nothing" in result.stderr
    assert find_device(HOST) == device


@pytest.mark.slow
def test_this_machine_is_measured_in_less_than_a_minute(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "machine.json"))
    result = CliRunner().invoke(cli.main, ["doctor", "--calibrate", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["devices"][HOST]
    assert found["matmul"]["float32"] > 1e9 and found["memory_bandwidth"] > 1e8
    assert set(found["collectives"]) == {"all_gather", "reduce_scatter", "all_reduce"}
    device = find_device(HOST)
    assert 1e-7 < device.dispatch_seconds < 1e-3 and device.crowding >= 1
