import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from stepgraph.cli.launcher import launch, peak_bytes, rank_device, threads_per_rank
from stepgraph.errors import BatchError, LaunchError


def add_up_ranks(start):
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return total.item(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def stand_alone(value):
    return value, os.getpid(), dist.is_initialized()


def fail_on_the_last_rank(kind):
    """The first rank waits in a collective for the last one, which fails."""
    if dist.get_rank() == dist.get_world_size() - 1:
        if kind == "raise":
            raise RuntimeError("the boiler burst")
        if kind == "refuse":
            raise BatchError("3 rows", why="two ranks", do="use 4")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def running_children():
    """All but multiprocessing's own two, which live as long as this process."""
    # Ranks that a server forks have its name.
    children = psutil.Process().children(recursive=True)
    servers = [c for c in children if c.ppid() == os.getpid() and "forkserver" in command_of(c)]
    return [c for c in children if c not in servers and "resource_tracker" not in command_of(c)]


def command_of(process):
    return " ".join(process.cmdline())


@pytest.fixture(params=[pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def start_method(request):
    """Each of the two ways that ranks begin; every test's own is set again."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


def failure_of(kind):
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(fail_on_the_last_rank, kind, ranks=2)
    assert time.monotonic() - start < 30
    assert not running_children()
    return caught.value


def test_ranks_share_a_group_and_the_cores(start_method):
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    threads = os.environ["OMP_NUM_THREADS"]
    results = launch(add_up_ranks, 10, ranks=2)
    assert results == [(21.0, threads, int(threads))] * 2
    assert not running_children()
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGINT) == handler


def read_setting():
    return os.environ["STEPGRAPH_TRIED"], os.environ["WORLD_SIZE"]


def test_ranks_get_the_environment_of_now_and_their_own_world(start_method, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    for value in ("one", "two"):
        monkeypatch.setenv("STEPGRAPH_TRIED", value)
        assert launch(read_setting, ranks=2) == [(value, "2")] * 2


def test_one_rank_runs_in_this_process():
    assert launch(stand_alone, 7, ranks=1) == [(7, os.getpid(), False)]


def test_an_error_on_one_rank_runs_through_unchanged():
    with pytest.raises(ZeroDivisionError):
        launch(divmod, 1, 0, ranks=1)


def test_only_the_error_of_the_first_failing_rank_is_shown():
    error = failure_of("raise")
    assert error.what == "rank 1 failed: RuntimeError: the boiler burst"
    assert error.where is not None
    assert "test_launcher.py:" in error.where
    assert 'raise RuntimeError("the boiler burst")' in error.where
    assert "rank 0" not in str(error)
    assert "Traceback" not in str(error)
    assert "Traceback" in error.__notes__[0]


def test_an_error_of_our_own_keeps_its_parts():
    error = failure_of("refuse")
    assert error.what == "rank 1 failed: BatchError: 3 rows"
    assert (error.why, error.do) == ("two ranks", "use 4")
    assert isinstance(error.__cause__, BatchError)


def test_a_killed_rank_is_named_not_the_one_that_lost_its_connection(start_method):
    error = failure_of("kill")
    assert error.what == "rank 1 was killed by signal 9 (SIGKILL)"
    assert "out of memory" in str(error)


WAITING = """
import multiprocessing, sys, time
sys.path.insert(0, {folder!r})
from stepgraph.cli.launcher import launch
from test_launcher import wait_for_ever
if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    launch(wait_for_ever, ranks=2)
"""


def wait_for_ever():
    os.write(1, b"ready\n")  # in one piece
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("method", "sent", "code"),
    [
        ("forkserver", signal.SIGKILL, -9),
        pytest.param("forkserver", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("spawn", signal.SIGKILL, -9, marks=pytest.mark.slow),
        pytest.param("spawn", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("spawn", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_their_parent(tmp_path, method, sent, code):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING.format(folder=os.path.dirname(__file__), method=method))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent cannot clean up
    )
    with parent:
        try:
            assert parent.stdout is not None
            assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            started = psutil.Process(parent.pid).children(recursive=True)
            assert len(started) >= 2
            parent.send_signal(sent)
            assert parent.wait(20) == code
            _, alive = psutil.wait_procs(started, timeout=10)
            assert not alive
        finally:
            parent.kill()


def test_under_torchrun_the_function_runs_in_place(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert launch(stand_alone, 7, ranks=5) == [(7, os.getpid(), True)]
    assert not dist.is_initialized()


def test_every_rank_gets_a_core():
    assert threads_per_rank(1) >= threads_per_rank(2) >= threads_per_rank(10_000) == 1


def test_memory_of_this_process_is_counted():
    before = peak_bytes(torch.device("cpu"))
    block = torch.ones(2**26)
    assert peak_bytes(torch.device("cpu")) >= max(before, block.nbytes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_gpu_ranks_run_on_the_cpu():
    assert rank_device() == torch.device("cpu")
