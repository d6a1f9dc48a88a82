"""What takes long is said on standard error, on the first rank, unless that is turned off."""

import os
import re
import subprocess
import sys
import time

import pytest

from stepgraph.runtime import progress
from tests.sampling import sampled

SCRIPT = """
import time, torch, stepgraph
from stepgraph.runtime import progress
progress.PATIENCE = 0.2

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x).mean()

def backend_of_seconds(make):
    def slow(*args, **options):
        time.sleep(0.5)
        return make(*args, **options)
    return slow

from stepgraph.runtime import compiler
compiler.lower_for_rank = backend_of_seconds(compiler.lower_for_rank)
model = Slow()
engine = stepgraph.Engine(model, loss=lambda m, x: m(x), lowering="eager")
engine.step(torch.ones(2, 4))
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "AGAIN", 0.05)
    monkeypatch.setenv(progress.VARIABLE, "1")


def test_what_takes_long_is_said_while_it_goes_on_and_when_it_is_over(impatient, capfd):
    with progress.doing("compiling"):
        assert progress.busy()
        time.sleep(0.5)
    assert not progress.busy()
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "stepgraph: compiling ..." and len(lines) > 2
    assert lines[1].startswith("stepgraph: compiling (") and lines[-1].startswith(
        "stepgraph: compiling: "
    )


def test_what_does_not_says_nothing(monkeypatch, capfd):
    monkeypatch.setenv(progress.VARIABLE, "1")
    with progress.doing("compiling"):
        pass
    with progress.Stages() as stages:
        stages.begin("one")
        stages.begin("two")
    assert capfd.readouterr() == ("", "")


def test_a_stage_ends_the_one_before_also_where_it_fails(impatient, capfd):
    with pytest.raises(ValueError), progress.Stages() as stages:
        stages.begin("one")
        time.sleep(0.2)
        stages.begin("two")
        raise ValueError
    time.sleep(0.2)
    assert not progress.busy() and "two" not in capfd.readouterr().err


def test_other_ranks_say_nothing_and_a_switch_turns_it_off(impatient, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    with progress.doing("compiling"):
        time.sleep(0.2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(progress.VARIABLE, "0")
    with progress.doing("compiling"):
        time.sleep(0.2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("switch", sampled(["1", "0"]))
def test_a_script_hears_of_its_first_step(switch):
    environment = os.environ | {progress.VARIABLE: switch}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True
    )
    said = "stepgraph: compiling step (eager) ..." in ran.stderr
    assert said == (switch == "1") and ran.stdout == ""


LONG = """
import torch, stepgraph

class Long(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        for i in range(LENGTH):
            x = torch.tanh(x)
        return self.linear(x).mean()

engine = stepgraph.Engine(Long(), loss=lambda m, x: m(x), lowering="eager")
engine.step(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_a_first_step_that_takes_long_says_so_after_five_seconds():
    """Nothing is patched: the code is captured operation by operation, and there are many."""
    assert progress.PATIENCE == 5.0
    script, environment = LONG.replace("LENGTH", "4000"), dict(os.environ)
    environment.pop(progress.VARIABLE, None)
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert "stepgraph: capturing the step's code ..." in ran.stderr, ran.stderr
    assert re.search(r"stepgraph: capturing the step's code: \d+ s", ran.stderr), ran.stderr
