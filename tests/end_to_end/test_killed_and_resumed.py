"""``stepgraph train`` killed at random moments and resumed ends as a run that nobody disturbed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stepgraph.cli.main import main
from stepgraph.runtime.checkpoints.manifest import NAME, Manifest

STEPS, EVERY = 60, 4
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)
MODEL = """
from torch import nn

class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(256, 96), nn.Linear(96, 96)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(96, 256)

    def forward(self, input_ids):
        return self.out(self.drop(self.inner(self.embed(input_ids)).relu()))
"""


class Run:
    """A run of two ranks in a folder."""

    def __init__(self, folder):
        self.folder, self.saves = folder, folder / "saves"
        folder.mkdir()
        (folder / "tiny.py").write_text(MODEL)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)

    def start(self, *options, steps=STEPS, ranks=2):
        command = [sys.executable, "-m", "stepgraph", "train", "--model", "tiny:Bytes"]
        command += ["--text", "text.txt", "--ranks", str(ranks), "--steps", str(steps)]
        command += ["--lowering", "eager", "--batch-per-rank", "2", "--seq", "32", "--lr", "0.01"]
        command += ["--checkpoint", "saves", "--save-every", str(EVERY)]
        command += ["--metrics", "run.jsonl", *options]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def finish(self, *options, **settings):
        process = self.start(*options, **settings)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def metrics(self):
        """(step, loss) of every line; a torn last line is left out."""
        path = self.folder / "run.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(row["step"], row["loss"]) for row in rows]

    def complete(self):
        """The steps of the saves that have a manifest; each of them is whole."""
        steps = []
        for folder in self.saves.glob("step-*"):
            if (folder / NAME).exists():
                manifest = Manifest.read(folder)
                manifest.verify(folder)
                steps.append(manifest.step)
        return sorted(steps)

    def last(self):
        """All of the last save, read without stepgraph."""
        folder = self.saves / f"step-{max(self.complete()):08d}"
        dcp_to_torch_save(folder, self.folder / "last.pt")
        return torch.load(self.folder / "last.pt", weights_only=False)


def ranks_of(process):
    """They are forked from a server, which is the command's own child."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if child.ppid() != process.pid]


def wait_for(condition, process):
    stop = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < stop
        time.sleep(0.0005)


def kill(run, process, rng, in_a_save):
    """Kills a run: at once, or by one rank; at a random step, or while a save is half-written."""
    before = len(run.metrics())
    wanted = before + rng.randrange(1, 8)
    wait_for(lambda: len(run.metrics()) != before and len(run.metrics()) >= wanted - EVERY, process)
    if in_a_save:
        # Behind a complete one, so that there is something to lose.
        wait_for(lambda: any(run.saves.glob("step-*")), process)
        wait_for(lambda: any(run.saves.glob(".step-*/*")), process)
    else:
        time.sleep(rng.random() * 0.05)
    ranks = ranks_of(process)
    for victim in rng.choice([ranks[:1], ranks[1:], [psutil.Process(process.pid), *ranks]]):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    psutil.wait_procs(ranks, timeout=60)
    return any(run.saves.glob(".step-*"))


def assert_equal(found, wanted, path=""):
    assert type(found) is type(wanted), path
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_equal(a, b, f"{path}.{index}")
    else:
        same = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
        assert same, path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "undisturbed")
    code, _, err = run.finish()
    assert code == 0, err
    assert run.complete() == [STEPS - EVERY, STEPS]
    return run


def kill_and_resume(folder, undisturbed, kills, seed):
    run, rng, torn = Run(folder), random.Random(seed), 0
    for number in range(kills):
        process = run.start("--resume")
        torn += kill(run, process, rng, in_a_save=number % 2 == 0)
        run.complete()
    code, _, err = run.finish("--resume")
    assert code == 0, err
    assert "resumed from" in err
    assert run.metrics() == undisturbed.metrics()
    assert_equal(run.last(), undisturbed.last())
    assert run.complete() == undisturbed.complete()
    assert not list(run.saves.glob(".step-*"))
    return torn


@pytest.mark.slow
def test_a_run_killed_once_in_a_save_ends_as_if_nothing_had_been(tmp_path, undisturbed):
    kill_and_resume(tmp_path / "run", undisturbed, kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_run_killed_ten_times_ends_as_if_nothing_had_been(tmp_path, undisturbed, seed):
    torn = kill_and_resume(tmp_path / "run", undisturbed, kills=10, seed=seed)
    assert torn >= 2  # some of them hit a save


@pytest.mark.slow
def test_a_signal_saves_and_leaves_and_other_ranks_go_on(tmp_path, undisturbed, monkeypatch):
    """Only one rank gets it; then a lone process finishes what two began."""
    run = Run(tmp_path / "run")
    process = run.start()
    wait_for(lambda: len(run.metrics()) > EVERY, process)
    ranks_of(process)[-1].send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    step = max(run.complete())
    assert process.returncode == 143, err
    assert f"stopped by SIGTERM after step {step}, saved to" in err
    assert f"step-{step:08d}" in out
    assert run.metrics()[-1][0] == step
    assert run.metrics() == undisturbed.metrics()[:step]
    monkeypatch.chdir(run.folder)
    options = ["--plan", "ddp", "--batch-per-rank", "4", "--metrics", "run.jsonl"]
    result = train("--resume", *options, "--steps", str(step + 6))
    assert result.exit_code == 0, result.output
    assert "with other data" not in result.stderr  # four rows are two on each of two ranks
    wanted = undisturbed.metrics()[: step + 6]
    for (step, loss), (number, expected) in zip(run.metrics(), wanted, strict=True):
        assert step == number
        assert abs(loss - expected) < 1e-4


def train(*options):
    """In this process, in the present folder."""
    command = ["train", "--model", "tiny:Bytes", "--text", "text.txt", "--lowering", "eager"]
    command += ["--batch-per-rank", "2", "--seq", "32", "--checkpoint", "saves", "--lr", "0.01"]
    return CliRunner().invoke(main, [*command, "--save-every", "4", *options])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_signal_to_every_parent_saves_and_leaves(tmp_path, number, ranks):
    run = Run(tmp_path / "run")
    process = run.start("--resume", steps=100_000, ranks=ranks)
    wait_for(lambda: len(run.metrics()) > EVERY, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"stopped by {number.name} after step {max(run.complete())}" in err
    assert run.metrics()[-1][0] == max(run.complete())


def test_bad_uses_of_a_folder_of_saves_are_said(tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    monkeypatch.chdir(run.folder)

    run.saves.write_text("a file")
    assert "is a file" in train().stderr
    run.saves.unlink()
    assert train("--steps", "8").exit_code == 0
    fresh = train("--steps", "8")
    assert fresh.exit_code == 2
    assert "holds the saves of a run up to step 8" in fresh.stderr
    assert "no step was left: 8 have been taken" in train("--steps", "8", "--resume").stdout
    damaged = run.saves / "step-00000008" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    resumed = train("--resume", "--steps", "9")
    assert resumed.exit_code == 1
    assert str(damaged) in resumed.stderr
    assert f"remove the folder {damaged.parent}; --resume then goes on from step 4" in (
        resumed.stderr
    )
