"""Ranks that do not do the same end soon and say what differs; a rank that is late is waited for."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from tests.end_to_end.ranks_apart import ODD_STEP
from tests.sampling import sampled

SOON, LAST = 15.0, 12  # seconds; lines
APART = {
    "rows": "on a batch of ",
    "lengths": "on a batch of ",
    "types": "on a batch of ",
    "branches": "runs other graphs",
    "branches of other sizes": "",  # gloo itself may be the first to say so
    "a value": "is another one than before on rank",
    "a missing step": "evaluate on a batch",
    "evaluation": "evaluate on a batch",
    "another plan": "the plan",
    "another setting": "micro_batches=2",
    "another model": "first.weight is float32[8, 6] on rank 0, float32[16, 6] on rank",
}

QUICK = ("branches",)


def run(case, ranks, **environment):
    """Exit codes, what was printed, and the seconds from where ranks differ to the end of the last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        **environment,
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.ranks_apart", case],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    ends: dict[int, float] = {}
    stop = time.monotonic() + 240
    while len(ends) < ranks and time.monotonic() < stop:
        for rank, process in enumerate(started):
            if rank not in ends and process.poll() is not None:
                ends[rank] = time.time()
        time.sleep(0.1)
    for process in started:
        process.kill()
    printed = [process.communicate() for process in started]
    assert len(ends) == ranks, printed
    said = re.findall(r"differs at ([\d.]+)", "".join(out for out, _ in printed))
    return [p.returncode for p in started], printed, max(ends.values()) - min(map(float, said))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in APART],
)
def test_ranks_that_do_not_do_the_same_end_and_say_what_differs(case, ranks):
    started = time.monotonic()
    codes, printed, apart = run(case, ranks)
    assert all(codes), (codes, printed)
    assert apart < SOON
    assert time.monotonic() - started < 60
    errors = [error for _, error in printed]
    if case == "branches":  # seen before the update: the step has no loss
        assert not any(f"step {ODD_STEP}:" in out for out, _ in printed), printed
    if APART[case]:
        last = ["\n".join(error.strip().splitlines()[-LAST:]) for error in errors]
        assert any("the ranks do not do the same" in lines for lines in last), errors
        assert any(APART[case] in lines for lines in last), errors


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", sampled(["an exception", "an exit"]))
def test_a_rank_that_ends_is_not_waited_for(case, ranks):
    codes, printed, apart = run(case, ranks)
    assert all(codes), (codes, printed)
    assert apart < SOON
    of_its_own = {"an exception": "ValueError: a rank's own", "an exit": ""}[case]
    assert of_its_own in printed[-1][1]
    for _, error in printed[:-1]:
        assert "Error" in error.strip().splitlines()[-1] or "ended" in error, error


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, seconds",
    [
        (case, seconds)
        for case in ("a late program", "a late batch", "a late save")
        for seconds in ("8", "120" if case == "a late program" else "60")
    ],
)
def test_a_rank_that_is_late_is_waited_for(case, seconds, tmp_path):
    late = {"LATE": seconds, "STEPGRAPH_PROGRESS": "1", "SAVED": str(tmp_path / "saved")}
    codes, printed, _ = run(case, 2, **late)
    assert codes == [0, 0], printed
    if case == "a late save":
        assert (tmp_path / "saved").is_dir()
    if case == "a late batch":
        (_, first), (_, second) = printed
        assert (
            "stepgraph: waiting for ranks [1] to come to call" in first and "waiting" not in second
        )
    assert all("step 5" in out and "done" in out for out, _ in printed)
    assert not any("Warning" in error or "c10d" in error for _, error in printed), printed
