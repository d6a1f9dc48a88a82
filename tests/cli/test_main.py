import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from stepgraph.cli import main as cli
from stepgraph.cli import plan, train, training
from stepgraph.cli.training import Summary, TrainOptions
from stepgraph.equivalence import check
from stepgraph.errors import BatchError, CaptureError, LaunchError
from stepgraph.lowering.cache import Cache

# The command line is an interface: a script that works today works tomorrow. Add to this table;
# change or take away nothing. Option, default, whether it must be given.
SHARED = {
    "--model": (None, True),
    "--plan": ("zero3", False),
    "--memory": (None, False),
    "--micro-batches": (1, False),
    "--max-grad-norm": (None, False),
    "--seed": (0, False),
    "--lr": (1e-3, False),
}
COMMANDS = {
    "train": SHARED
    | {
        "--batch-per-rank": (8, False),
        "--seq": (128, False),
        "--text": (None, True),
        "--ranks": (None, False),
        "--mesh": (None, False),
        "--steps": (200, False),
        "--lowering": (None, False),
        "--metrics": (None, False),
        "--sample": (0, False),
        "--strict": (False, False),
        "--checkpoint": (None, False),
        "--save-every": (50, False),
        "--resume": (False, False),
        "--json": (False, False),
    },
    "check": SHARED
    | {
        "--batch-per-rank": (2, False),
        "--seq": (64, False),
        "--mesh": (None, True),
    },
    "plan": {
        "model": (None, True),
        "--mesh": (None, True),
        "--ranks": (None, False),
        "--device": ("h100", False),
        "--batch-per-rank": (2, False),
        "--seq": (8192, False),
        "--plan": ("auto", False),
        "--memory": ("auto", False),
        "--memory-budget": (None, False),
        "--compare": (None, False),
        "-o": (None, False),
        "--html": (None, False),
        "--json": (False, False),
    },
    "explain": {"plan": (None, True), "value": (None, False)},
    "doctor": {"--json": (False, False), "--calibrate": (False, False)},
    "cache": {"--json": (False, False), "--clear": (False, False)},
}

SUMMARY = Summary(
    model="llama-tiny",
    parameters=1_820_352,
    plan="zero3",
    mesh="dp=2",
    ranks=2,
    device="cpu",
    steps=3,
    first_loss=5.5,
    last_loss=2.5,
    tokens_per_second=1234.5,
    peak_bytes=2**30,
    compile_seconds=4.0,
    seconds=9.0,
    losses=[5.5, 4.0, 2.5],
    prompt=None,
    sample=None,
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"to be or not to be\n" * 300)
    return str(path)


@pytest.fixture
def launched(monkeypatch):
    """What would have been launched; nothing is."""
    calls = []

    def launch(function, *args, ranks, signals=None):
        calls.append((args, ranks))
        return [SUMMARY]

    monkeypatch.setattr(training, "launch", launch)
    return calls


def run(*args):
    return CliRunner().invoke(cli.main, args)


def usage_error(*args):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


def default_of(option):
    return option.to_info_dict()["default"]


def test_the_command_line_is_frozen():
    found = {
        name: {
            option.opts[0]: (default_of(option), option.required)
            for option in cli.main.get_command(None, name).params
        }
        for name in cli.main.list_commands(None)
    }
    assert found == COMMANDS


def test_options_and_the_record_of_them_agree():
    record = TrainOptions(model=None, text=None)
    names = [field.name for field in fields(TrainOptions)]
    assert {"--" + name.replace("_", "-") for name in names} == set(COMMANDS["train"]) - {"--json"}
    for name in names:
        assert getattr(record, name) == COMMANDS["train"]["--" + name.replace("_", "-")][0]


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert "0 compiled graphs" in run("cache").stdout
    Cache().compiled(
        [("a", lambda: Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "a.so").write_bytes(bytes(9)))]
    )
    shown = json.loads(run("cache", "--json").stdout)
    assert [entry["bytes"] for entry in shown["entries"]] == [9]
    assert "1 compiled graphs" in run("cache").stdout
    assert "removed 0.0 MiB" in run("cache", "--clear").stdout
    assert not (tmp_path / "stepgraph").exists()


@pytest.mark.parametrize(
    "command", [[], ["train"], ["check"], ["plan"], ["explain"], ["doctor"], ["cache"]]
)
def test_help_has_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "  Example:\n    stepgraph " in result.stdout


def test_the_version_is_told():
    assert "0.1.0" in run("--version").stdout


def test_a_summary_a_curve_and_a_sample_go_to_standard_output(text, launched, monkeypatch):
    spoken = {"prompt": "not\n", "sample": "to be"}
    monkeypatch.setattr(training, "launch", lambda *a, **k: [replace(SUMMARY, **spoken)])
    result = run("train", "--model", "llama-tiny", "--text", text, "--sample", "5")
    assert result.exit_code == 0, result.output
    assert "loss         5.500 -> 2.500 in 3 steps" in result.stdout
    assert "1,234 tokens/s" in result.stdout
    assert "   5.500 |*" in result.stdout
    assert result.stdout.endswith("sample, continuing 'not\\n':\nto be\n")


def test_a_run_that_was_stopped_or_resumed_says_so(text, monkeypatch):
    changed = {"first_step": 8, "steps": 10, "stopped_by": "SIGTERM", "saved_to": "/saves/step-10"}
    monkeypatch.setattr(training, "launch", lambda *a, **k: [replace(SUMMARY, **changed)])
    result = run("train", "--model", "llama-tiny", "--text", text)
    assert result.exit_code == 143
    assert "in the last 3 of 10" in result.stdout
    assert "saved to     /saves/step-10" in result.stdout
    assert "steps 8 to 10" in result.stdout
    nothing = {"losses": [], "first_loss": None, "last_loss": None, "first_step": 4}
    monkeypatch.setattr(training, "launch", lambda *a, **k: [replace(SUMMARY, **nothing)])
    result = run("train", "--model", "llama-tiny", "--text", text)
    assert result.exit_code == 0
    assert "no step was left: 3 have been taken" in result.stdout


def test_a_run_with_a_checkpoint_that_is_stopped_too_early_leaves_with_its_code(
    text, tmp_path, monkeypatch
):
    for stop, code in ((KeyboardInterrupt(), 130), (SystemExit(143), 143)):
        monkeypatch.setattr(training, "launch", raising(stop))
        options = ["--text", text, "--checkpoint", str(tmp_path / "saves")]
        result = run("train", "--model", "llama-tiny", *options)
        assert result.exit_code == code
        assert "stopped at once; what was complete in" in result.stderr


def test_ctrl_c_is_one_line_and_the_code_of_the_signal(text, monkeypatch):
    monkeypatch.setattr(training, "launch", raising(KeyboardInterrupt()))
    monkeypatch.setattr(plan, "list_jobs", raising(KeyboardInterrupt()))
    train = ["train", "--model", "llama-tiny", "--text", text, "--ranks", "2"]
    for command in (train, ["plan", "llama-tiny", "--mesh", "auto", "--ranks", "4"]):
        result = run(*command)
        assert result.exit_code == 130 and result.stderr == "stepgraph: stopped\n"


def test_json_is_all_of_standard_output(text, launched):
    result = run("train", "--model", "llama-tiny", "--text", text, "--json")
    assert json.loads(result.stdout) == asdict(SUMMARY)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ([], 1),
        (["--ranks", "2"], 2),
        (["--mesh", "dp=4"], 4),
        (["--mesh", "dp=4", "--ranks", "4"], 4),
    ],
)
def test_ranks_follow_from_the_mesh(text, launched, options, ranks):
    assert run("train", "--model", "llama-tiny", "--text", text, *options).exit_code == 0
    (((_, mesh), asked),) = launched
    assert asked == mesh.world_size == ranks


def test_options_arrive(text, launched):
    options = {
        "--plan": "zero1", "--memory": "full", "--lowering": "eager", "--steps": "7",
        "--batch-per-rank": "4", "--micro-batches": "2", "--seq": "32", "--lr": "0.5",
        "--max-grad-norm": "1.5", "--seed": "9", "--sample": "3", "--save-every": "5",
        "--checkpoint": f"{text}.saves",
    }  # fmt: skip
    flat = [word for option in options.items() for word in option]
    result = run("train", "--model", "llama-tiny", "--text", text, "--strict", "--resume", *flat)
    assert result.exit_code == 0, result.output
    (arrived, _), _ = launched[0]
    assert arrived == TrainOptions(
        model="llama-tiny", text=text, plan="zero1", memory="full", lowering="eager", steps=7,
        batch_per_rank=4, micro_batches=2, seq=32, lr=0.5, max_grad_norm=1.5, seed=9, sample=3,
        strict=True, save_every=5, checkpoint=f"{text}.saves", resume=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-tinny"], "did you mean 'llama-tiny'"),
        (["--plan", "zero4"], "unknown plan 'zero4'"),
        (["--memory", "some"], "unknown memory policy 'some'"),
        (["--memory", "budget:8XiB"], "its units are B, KiB"),
        (["--lowering", "induktor"], "did you mean 'inductor'"),
        (["--mesh", "dp"], "mesh 'dp' is not understood"),
        (["--mesh", "dp=4", "--ranks", "2"], "mesh dp=4 has 4 ranks, but --ranks is 2"),
        (["--batch-per-rank", "3", "--micro-batches", "2"], "does not divide"),
        (["--batch-per-rank", "100", "--ranks", "2"], "25600 bytes are needed, 5700 given"),
        (["--text", "/no/such/text"], "there is no text at '/no/such/text'"),
        (["--metrics", "/no/such/folder/m.jsonl"], "no folder for --metrics"),
        (["--ranks", "0"], "0 is not in the range"),
        (["--resume"], "--resume needs to know where the saves are"),
        (["--checkpoint", "/dev/null"], "--checkpoint '/dev/null' is a file"),
        (["--checkpoint", "/proc/no"], "--checkpoint '/proc/no' cannot be written"),
        (["--steps", "some"], "not a valid integer"),
        (["--stepz", "3"], "--steps"),
    ],
)
def test_bad_usage_is_said_before_anything_is_launched(text, launched, options, message):
    assert message in usage_error("train", "--model", "llama-tiny", "--text", text, *options)
    assert not launched


def test_a_missing_option_is_bad_usage():
    assert "--text" in usage_error("train", "--model", "llama-tiny")


def test_ranks_cannot_contradict_torchrun(text, launched, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    error = usage_error("train", "--model", "llama-tiny", "--text", text, "--ranks", "2")
    assert "4 ranks were launched already" in error


def raising(error, cause=None):
    def launch(*args, **kwargs):
        raise error from cause

    return launch


def test_a_failure_is_a_message_and_exit_code_1(text, monkeypatch):
    monkeypatch.setattr(training, "launch", raising(CaptureError("no", why="random")))
    result = run("train", "--model", "llama-tiny", "--text", text)
    assert result.exit_code == 1
    assert result.stderr.startswith("stepgraph: no\n  why: random\n")
    assert result.stdout == ""


def test_bad_usage_found_by_a_rank_is_still_bad_usage(text, monkeypatch):
    error = raising(LaunchError("rank 1 failed: ..."), BatchError("3 rows"))
    monkeypatch.setattr(training, "launch", error)
    stderr = usage_error("train", "--model", "llama-tiny", "--text", text)
    assert stderr.startswith("stepgraph: 3 rows")


class Report(SimpleNamespace):
    def __str__(self):
        return "every pass, line by line"


def test_check_hands_the_global_batch_to_the_check(monkeypatch):
    seen = {}

    def check_model(model, **options):
        seen.update(options)
        return Report(ok=True, first_difference=None)

    monkeypatch.setattr(check, "check_model", check_model)
    result = run(
        "check", "--model", "llama-tiny", "--mesh", "dp=4", "--plan", "zero2", "--memory", "full",
        "--micro-batches", "2", "--max-grad-norm", "1.0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == "every pass, line by line\n"
    assert seen["batch"]["input_ids"].shape == (8, 64)
    assert (seen["mesh"], seen["plan"], seen["memory"]) == ("dp=4", "zero2", "full")
    assert (seen["micro_batches"], seen["max_grad_norm"]) == (2, 1.0)


def test_check_exits_with_1_and_the_name_of_the_pass(monkeypatch):
    report = Report(ok=False, first_difference="place_values")
    monkeypatch.setattr(check, "check_model", lambda *args, **options: report)
    result = run("check", "--model", "llama-tiny", "--mesh", "dp=2")
    assert result.exit_code == 1
    assert result.stdout == "every pass, line by line\n"
    assert result.stderr == "stepgraph: the first pass that differs: place_values\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "dp"], "not understood"),
        (["--mesh", "dp=2", "--plan", "zero4"], "unknown plan"),
        (["--mesh", "dp=2", "--memory", "some"], "unknown memory policy"),
        (["--mesh", "dp=2", "--model", "gtp2"], "did you mean 'gpt2'"),
    ],
)
def test_bad_usage_of_check(options, message):
    assert message in usage_error("check", "--model", "llama-tiny", *options)


@pytest.mark.parametrize("losses", [[3.0], [2.0, 2.0], [float(9 - i % 7) for i in range(500)]])
def test_a_curve_fits_the_screen(losses):
    lines = train.loss_curve(losses).splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 70
    assert lines[-1].strip() == f"steps 1 to {len(losses)}"
    assert sum(line.count("*") for line in lines) == min(60, len(losses))
