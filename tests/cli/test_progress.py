import json

import pytest
from rich.console import Console

from stepgraph.cli import progress
from stepgraph.cli.progress import Stages, StepMetrics, Watch, keep_up_to
from stepgraph.errors import UsageError

DONE = StepMetrics(1, 2.0, 3.0, 2**30, 5.0)


def test_only_the_first_rank_speaks(capsys, tmp_path):
    for show in (True, False):
        with Watch(1, str(tmp_path / f"{show}.jsonl"), show=show) as watch:
            watch.step(DONE)
    out, err = capsys.readouterr()
    assert out == ""
    line = "step 1/1  loss 2.000  3 tokens/s  1.00 GiB"
    assert err.splitlines() == ["compiling the first step", line]
    assert [path.name for path in tmp_path.iterdir()] == ["True.jsonl"]


def test_a_step_is_in_the_file_before_the_next_one(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0}\n')
    with Watch(2, str(path), show=True) as watch:
        watch.step(DONE)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"step": 0}
    assert rows[1] == {
        "step": 1, "loss": 2.0, "tokens_per_second": 3.0, "peak_bytes": 2**30, "seconds": 5.0
    }  # fmt: skip


@pytest.mark.parametrize("steps_done", [0, 1])
def test_a_terminal_gets_a_bar(monkeypatch, capsys, steps_done):
    def terminal(**settings):
        return Console(**settings, force_terminal=True, width=100)

    monkeypatch.setattr(progress, "Console", terminal)
    with Watch(3, None, show=True) as watch:
        for _ in range(steps_done):
            watch.step(DONE)
    err = capsys.readouterr().err
    assert "compiling" in err
    assert ("step 1/3" in err and "loss 2.000" in err) == bool(steps_done)


def lines(*steps):
    return b"".join(StepMetrics(step, 2.0, 3.0, 4, 5.0).to_line() for step in steps)


def test_a_resumed_run_removes_what_came_after_its_save(tmp_path):
    path = tmp_path / "run.jsonl"
    earlier = lines(1, 2)  # another run's, in the same file
    path.write_bytes(earlier + lines(1, 2, 3) + b'{"step": 4, "lo')
    with Watch(4, str(path), show=True, resumed_at=1) as watch:
        watch.step(DONE)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 1, 1]
    with Watch(4, str(path), show=True, resumed_at=0):
        pass
    assert path.read_text() == ""
    with Watch(4, str(tmp_path / "new.jsonl"), show=True, resumed_at=0):
        pass
    assert [entry.name for entry in tmp_path.iterdir() if entry.name[0] == "."] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"no step", "not JSON"),
        (b'{"step": 3}', "missing required field `loss`"),
        (lines(3).strip().replace(b"}", b', "note": 1}'), "unknown field `note`"),
        (lines(3).strip().replace(b"3.0", b'"fast"'), "tokens_per_second: Expected a number"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["words", "missing", "unknown", "text", "deep"],
)
def test_a_line_that_is_no_steps_is_not_removed_but_said(tmp_path, line, why):
    path = tmp_path / "run.jsonl"
    path.write_bytes(lines(1, 2) + line + b"\n" + lines(4))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"run\.jsonl:3") as caught:
        keep_up_to(path, 1)
    assert why in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_can_be_read_again(tmp_path, loss):
    path = tmp_path / "run.jsonl"
    path.write_bytes(StepMetrics(1, loss, 3.0, 4, 5.0).to_line())
    assert json.loads(path.read_text())["loss"] is None
    keep_up_to(path, 1)
    assert path.read_bytes() != b""


def test_stages_are_lines_in_a_log_and_a_bar_on_a_terminal(monkeypatch, capsys):
    with Stages(2) as stages:
        stages.begin("capture")
        stages.begin("solve")
    assert capsys.readouterr().err.splitlines() == ["capture", "solve"]

    def terminal(**settings):
        return Console(**settings, force_terminal=True, width=100)

    monkeypatch.setattr(progress, "Console", terminal)
    with Stages(1) as stages:
        for name in ("capture", "solve", "simulation"):  # more than were foreseen
            stages.begin(name)
        stages.progress.refresh()
    assert "simulation" in capsys.readouterr().err
