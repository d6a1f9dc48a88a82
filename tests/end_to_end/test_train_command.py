import json
import os
import subprocess
import sys

import pytest

# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two ranks, its metrics and its folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    return train(folder, "--metrics", "run.jsonl", "--sample", "12"), folder


def train(folder, *options):
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "stepgraph", "train"]
    command += ["--model", "config.json", "--text", "text.txt", "--ranks", "2", "--steps", "12"]
    command += ["--lowering", "eager", "--batch-per-rank", "2", "--seq", "32", "--lr", "0.02"]
    command += ["--json", *options]
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment
    )


def metrics(folder):
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def test_the_loss_falls(run):
    result, _ = run
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["last_loss"] < summary["first_loss"] - 0.5
    assert summary["mesh"] == "dp=2"
    assert summary["compile_seconds"] > 0
    assert summary["sample"]
    assert summary["prompt"] in "the quick brown fox jumps over the lazy dog\n" * 3


def test_every_step_is_in_the_metrics_once(run):
    result, folder = run
    rows = metrics(folder)[:12]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == json.loads(result.stdout)["losses"]
    for row in rows:
        assert set(row) == {"step", "loss", "tokens_per_second", "peak_bytes", "seconds"}
        assert row["peak_bytes"] > 2**20
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(2 * 2 * 32)


def test_progress_goes_to_standard_error(run):
    result, _ = run
    assert result.stderr.splitlines()[0] == "compiling the first step"
    assert "step 12/12" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_run_again_is_the_same_run_and_metrics_are_appended(run):
    result, folder = run
    again = train(folder, "--metrics", "run.jsonl")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["losses"] == json.loads(result.stdout)["losses"]
    assert [row["step"] for row in metrics(folder)] == list(range(1, 13)) * 2
