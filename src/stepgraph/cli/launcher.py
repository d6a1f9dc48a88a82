"""Starts the ranks of a run on this machine, by torch's own elastic launcher.

The only file that chooses a device and a communication backend. When one rank fails the others are
stopped, and what is raised is the error of the rank that failed first: the later ones, which only
lost their connection to it, are not shown.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stepgraph.cli.fork_server import has_server
from stepgraph.errors import LaunchError, StepgraphError
from stepgraph.runtime.files import whole_file
from stepgraph.runtime.host_memory import host_memory_bytes
from stepgraph.runtime.ranks import communication_first, fit_for_graphs, leave_group

LOCALHOST = "127.0.0.1"
MONITOR_SECONDS = 0.1
# A rank that raised lives on so long: one that was killed just before is seen to be gone first.
LINGER_SECONDS = 3 * MONITOR_SECONDS
SHUTDOWN_SECONDS = 3
# A launcher without the setting (torch 2.11) waits for ranks that linger as long as it likes.
_HAS_PATIENCE = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
_PATIENCE: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_SECONDS} if _HAS_PATIENCE else {}
# What SIGINT and SIGTERM do: the words are the launcher's, of the signals that it ends ranks by.
END_RANKS, PASS_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "SIGHUP,SIGQUIT"
# What torch's launcher tells each rank, which no other environment may overwrite.
_TOLD_TO_RANKS = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_NOISY_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


def launch(
    function: Callable[..., Any], *args: Any, ranks: int = 1, signals: str = END_RANKS
) -> list[Any]:
    """Runs ``function(*args)`` on every rank.

    A rank is a new Python that imports everything, some seconds; where many runs are launched,
    ``multiprocessing.set_start_method("forkserver")`` has ranks forked from a server that did.

    Args:
        function: importable by name, as its arguments and result must be picklable.
        ranks: how many; one runs in this process, without a process group. Where this process is
            a rank already (``torchrun``), the function runs in place and ``ranks`` is not read.
        signals: what SIGINT and SIGTERM do to the ranks that are started here: they end them, or
            (:data:`PASS_ON`) the ranks get them and return when they are ready; a second one ends them.

    Returns:
        the results of the ranks that were started here, in order: one in place, else ``ranks``.

    Raises:
        LaunchError: a rank failed; its own message is that of the first that did, and its cause is
            that rank's error where stepgraph raised it.
        KeyboardInterrupt, SystemExit: this process was told to stop; the ranks are stopped before.
    """
    if "RANK" in os.environ:
        return [_run_in_group(function, args)]
    if ranks == 1:
        return [function(*args)]
    known = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="stepgraph-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOCALHOST}:0",
            local_addr=LOCALHOST,
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
            start_method="forkserver" if has_server() else "spawn",
            **_PATIENCE,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            signals_to_handle=signals,
        )
        with (
            _environment_of_ranks(ranks),
            _signals_handled(known, signals) as passed_on,
            _quiet_loggers(),
        ):
            try:
                run = elastic_launch(config, _run_rank)
                own = {k: v for k, v in os.environ.items() if not k.startswith(_TOLD_TO_RANKS)}
                results = run(directory, own, function, args)
            except ChildFailedError as error:
                codes = {failure.exitcode for failure in error.failures.values()}
                if stopped := [number for number in passed_on if -number in codes]:
                    _end_by(stopped[0])  # it came before the rank was ready for it
                failed = _launch_error(Path(directory), *error.get_first_failure())
                raise failed from failed.__cause__
            except SignalException as error:
                _end_by(error.sigval)
            finally:
                # The launcher lost track of those that a signal found while it was starting them.
                lost = set(multiprocessing.active_children()) - known
                for process in lost:
                    process.kill()
                for process in lost:
                    process.join(SHUTDOWN_SECONDS)
        return [results[rank] for rank in range(ranks)]


# -- devices


def rank_device() -> torch.device:
    """This rank's device: a GPU of its own where the machine has enough of them, else the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def communication_backends() -> dict[str, tuple[bool, bool]]:
    """Backend -> (whether torch has it, whether ranks of this machine need it)."""
    on_gpu = torch.cuda.is_available()
    return {
        "gloo": (dist.is_gloo_available(), not on_gpu),
        "nccl": (dist.is_nccl_available(), on_gpu),
    }


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of the allocator on a GPU, of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_bytes(device: torch.device) -> int:
    """What a rank's device has: a GPU's own memory, or the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes()


def threads_per_rank(ranks: int) -> int:
    """The cores that this process may use, divided over the ranks; at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)


# -- in a rank


@dataclass(frozen=True)
class _Failure:
    """What a failed rank leaves behind. ``error`` is the error itself, if stepgraph raised it."""

    time_ns: int
    summary: str
    where: str
    traceback: str
    error: StepgraphError | None


def _run_rank(
    directory: str, environment: dict[str, str], function: Callable[..., Any], args: tuple
) -> Any:
    os.environ.update(environment)
    _end_with_parent()
    # A Python handler would wait for a collective to return, which may never happen.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return _run_in_group(function, args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return None
        _record(Path(directory), error)
        time.sleep(LINGER_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of a broken process group could keep the interpreter from ending


def _end_with_parent() -> None:
    """A rank that was forked from a server, which outlives its client, interrupts itself in time.

    The kernel does so for one that its parent started: torch's launcher asks it to.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid == os.getppid():
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def _run_in_group(function: Callable[..., Any], args: tuple) -> Any:
    device = rank_device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return function(*args)
    with communication_first(device.type), fit_for_graphs():
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    result = function(*args)
    dist.barrier()  # nobody hangs up on a rank that is still talking
    leave_group()
    return result


def _record(directory: Path, error: BaseException) -> None:
    where = ""
    if frames := traceback.extract_tb(error.__traceback__):
        last = frames[-1]
        where = f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"
    failure = _Failure(
        time.time_ns(),
        f"{type(error).__name__}: {error}".rstrip(": "),
        where,
        "".join(traceback.format_exception(error)),
        error if isinstance(error, StepgraphError) else None,
    )
    with whole_file(directory / f"failure-{os.environ['RANK']}.pickle") as unfinished:
        unfinished.write_bytes(pickle.dumps(failure))


# -- in the parent


def _launch_error(directory: Path, rank: int, seen: ProcessFailure) -> LaunchError:
    """The error of the rank that failed first: the earliest recorded, or one that was killed."""
    failures: dict[int, _Failure] = {
        int(path.stem.removeprefix("failure-")): pickle.loads(path.read_bytes())
        for path in directory.glob("failure-*.pickle")
    }
    if rank not in failures:
        what = f"rank {rank} ended with exit code {seen.exitcode}"
        if seen.exitcode < 0:
            what = f"rank {rank} was killed by signal {-seen.exitcode} ({seen.signal_name()})"
        killed = seen.exitcode == -signal.SIGKILL
        return LaunchError(
            what,
            why="it left no error" + (": the machine may have run out of memory" if killed else ""),
        )
    first = min(failures, key=lambda rank: failures[rank].time_ns)
    failure = failures[first]
    error = failure.error
    if error is None:
        raised = LaunchError(f"rank {first} failed: {failure.summary}", where=failure.where)
    else:
        raised = LaunchError(
            f"rank {first} failed: {type(error).__name__}: {error.what}",
            where=error.where or failure.where,
            why=error.why,
            do=error.do,
        )
    raised.__cause__ = error
    raised.add_note(f"on rank {first}:\n{failure.traceback}")
    return raised


def _end_by(number: int) -> NoReturn:
    """What ends this process when it was told to stop."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt from None
    sys.exit(128 + number)


@contextlib.contextmanager
def _environment_of_ranks(ranks: int) -> Iterator[None]:
    """Ranks inherit a share of the cores; this process gets its own environment back."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    # Ranks that are killed leave locks behind; multiprocessing's tracker frees them, and warns.
    others = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{others},{quiet}" if others else quiet
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _signals_handled(known: set[Any], signals: str) -> Iterator[list[int]]:
    """With :data:`PASS_ON`, the ranks get SIGINT and SIGTERM; gives the list of those that came.

    Handlers are put back afterwards, those too that the elastic launcher installs and leaves.
    """
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        ranks = [p.pid for p in set(multiprocessing.active_children()) - known if p.pid]
        if came or not ranks:  # the second one, or before there is anybody to tell
            raise SignalException(f"got signal {number}", signal.Signals(number))
        came.append(number)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    if signals == PASS_ON:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_loggers() -> Iterator[None]:
    """What the elastic launcher logs about a failure is said by :class:`LaunchError`."""
    silence = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silence)
            logger.propagate = propagate
