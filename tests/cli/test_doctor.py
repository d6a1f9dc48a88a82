"""What the doctor says, by trying things that work and things that do not."""

import json

import pytest
from click.testing import CliRunner

from stepgraph.cli import main as cli
from stepgraph.cli.diagnosis import (
    FAILED,
    NOT_HERE,
    OK,
    Check,
    cache_check,
    torch_check,
    try_out,
)
from stepgraph.cli.doctor import show, to_json


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("2.13.0+cpu", OK, "2.13.0+cpu"),
        ("2.11.0", OK, "2.11.0"),
        ("2.14.1", OK, "tested on 2.11 to 2.13"),
        ("2.9.1", FAILED, "tested on 2.11 to 2.13"),
    ],
)
def test_versions_of_torch(version, status, words):
    check = torch_check(version)
    assert check.status == status and words in check.found
    assert bool(check.do) == (words != version)
    assert check.ok == (status == OK)


def test_a_cache_that_cannot_be_written_is_a_failure_that_names_the_variable(tmp_path):
    assert cache_check(str(tmp_path / "made")).status == OK
    file = tmp_path / "file"
    file.write_text("")
    check = cache_check(str(file))
    assert check.status == FAILED and not check.ok
    assert str(file) in check.found and "TORCHINDUCTOR_CACHE_DIR" in check.do


def test_a_trial_that_does_not_end_is_a_failure():
    check = try_out("ranks", seconds=0.5)
    assert check.status == FAILED and "did not end" in check.found and "127.0.0.1" in check.do


@pytest.mark.slow
def test_the_eager_lowering_is_tried():
    check = try_out("eager lowering")
    assert check.status == OK and "agrees with plain PyTorch" in check.found


@pytest.mark.slow
def test_ranks_are_tried_whatever_launched_this_process():
    check = try_out("ranks", environment={"PYTHONWARNINGS": "ignore"})
    assert check.status == OK, check.found


def test_without_a_compiler_the_inductor_lowering_fails_with_the_reason(tmp_path):
    check = try_out("inductor lowering", environment={"CXX": str(tmp_path / "no-such-compiler")})
    assert check.status == FAILED and not check.ok
    assert "ompiler" in check.found and "eager" in check.do


def test_what_is_not_needed_may_be_missing():
    assert Check("CUDA graphs", NOT_HERE, "there is no CUDA device").ok
    assert not Check("ranks", FAILED, "no", needed=True).ok


def test_the_table_and_the_json_say_the_same(capsys):
    checks = [
        Check("torch", OK, "2.13.0", needed=True),
        Check("ranks", FAILED, "no network", "allow 127.0.0.1", needed=True),
    ]
    show(checks)
    table = capsys.readouterr().out
    for words in ("torch", "2.13.0", "ok", "failed", "no network", "what to do: allow 127.0.0.1"):
        assert words in table
    found = json.loads(to_json(checks))
    assert found["ok"] is False
    assert found["checks"][1]["do"] == "allow 127.0.0.1"


@pytest.mark.slow
def test_this_machine_is_well():
    result = CliRunner().invoke(cli.main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] is True
    status = {check["name"]: check["status"] for check in found["checks"]}
    for name in ("python", "torch", "C++ compiler", "eager lowering", "inductor lowering", "ranks"):
        assert status[name] == OK
    assert "looking at ranks" in result.stderr
