import subprocess
import sys

import pytest

import stepgraph
from stepgraph.cli.rank_server import asks_for_ranks, has_accelerator


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
    assert asks_for_ranks(["--model", "llama-tiny", *text.split()]) == asks
    monkeypatch.setenv("RANK", "0")  # under torchrun the ranks are there
    assert not asks_for_ranks(text.split())


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
