import importlib.util
import multiprocessing
import subprocess
import sys

import pytest

import stepgraph
from stepgraph.cli import fork_server
from stepgraph.cli.fork_server import has_accelerator, modules_for, start_server

OF_MODELS = "transformers.modeling_utils"


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("--ranks 2", True), ("--ranks=12", True), ("--mesh dp=2,tp=2", True), ("--mesh=tp=4", True),
        ("--mesh dp=1,tp=2", True), ("--ranks 1", False), ("--mesh dp=1", False), ("--steps 20", False),
        ("", False), ("--ranks two", False), ("--ranks", False),
    ],
)  # fmt: skip
def test_a_server_is_started_where_ranks_are_asked_for(text, asks, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    train = ["train", "--model", "llama-tiny", *text.split()]
    assert ("stepgraph.cli.training" in modules_for(train)) == asks
    monkeypatch.setenv("RANK", "0")  # under torchrun the ranks are there
    assert not modules_for(train)


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("--mesh auto --ranks 8", True), ("--mesh=auto --ranks=8", True), ("--ranks 8", False),
        ("--mesh dp=8 --mesh dp=4,tp=2", True), ("--mesh dp=8", False), ("--mesh", False), ("", False),
    ],
)  # fmt: skip
def test_and_where_several_meshes_are_planned(text, asks, monkeypatch):
    monkeypatch.setattr(fork_server, "cores", lambda: 2)
    found = modules_for(["plan", "llama-tiny", *text.split()])
    assert ("stepgraph.cli.plans.processes" in found) == (OF_MODELS in found) == asks
    assert OF_MODELS not in modules_for(["plan", "mine.models:make", *text.split()])
    assert not modules_for(["explain", *text.split()])
    monkeypatch.setattr(fork_server, "cores", lambda: 1)  # one process plans them all
    assert not modules_for(["plan", "llama-tiny", *text.split()])


def test_what_is_imported_beforehand_can_be():
    for command in (["train", "--ranks", "2"], ["plan", "llama-tiny", "--mesh", "auto"]):
        assert all(importlib.util.find_spec(name) for name in modules_for(command))


def test_a_program_that_is_more_than_a_command_keeps_its_ways():
    before = multiprocessing.get_start_method(allow_none=True)
    start_server(["plan", "llama-tiny", "--mesh", "auto", "--ranks", "4"])
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_ranks_of_a_gpu_are_not_forked(tmp_path):
    (tmp_path / "null").touch()
    assert not has_accelerator(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_accelerator(tmp_path)


def test_a_command_imports_torch_and_a_help_page_does_not():
    program = "import sys, stepgraph.cli.main; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


def test_a_public_name_is_imported_when_it_is_asked_for():
    assert all(getattr(stepgraph, name).__name__ == name for name in stepgraph.__all__)
    assert set(stepgraph.__all__) <= set(dir(stepgraph))
    with pytest.raises(AttributeError, match="has no attribute 'engine'"):
        stepgraph.engine  # noqa: B018
