"""Plans jobs in several processes: the steps of different global batches have nothing in common."""

import contextlib
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from stepgraph.api.planner import Attempt
from stepgraph.cli.fork_server import cores, has_server
from stepgraph.cli.plans.jobs import Desk, Here, Job, PlanOptions, Refused, Worker
from stepgraph.errors import StepgraphError
from stepgraph.pipeline import Made
from stepgraph.program.layout import MeshShape

MOST = 2  # processes: each holds captured steps, and what is made of them
_PATIENCE = 2.0  # seconds for one that has nothing left to do to end by itself


@contextlib.contextmanager
def workers_for(
    options: PlanOptions, jobs: Sequence[Job], stage: Callable[[str], None]
) -> Iterator[Sequence[Worker]]:
    """Who plans some jobs: this process, or others, no more than there are cores and global batches."""
    many = min(MOST, cores(), len({job.size for job in jobs}))
    if many < 2:
        yield [Here(options, stage)]
        return
    started = [_start(options) for _ in range(many)]
    patience = 0.0  # somebody is stopped, or something is wrong
    try:
        yield [_There(ours, stage) for ours, _ in started]
        patience = _PATIENCE
    finally:
        for ours, _ in started:
            ours.close()  # which a process takes for the end, when it asks for more
        for _, process in started:
            process.join(patience)
            process.terminate()
            process.join()


def _start(options: PlanOptions) -> tuple[Connection, BaseProcess]:
    context = get_context("forkserver") if has_server() else get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, options), daemon=True)
    # A new process would run the script that runs here, which need not be made for that.
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = script
    theirs.close()
    return ours, process


class _There:
    """Another process."""

    def __init__(self, connection: Connection, stage: Callable[[str], None]) -> None:
        self.sizes: set[int] = set()
        self._connection, self._stage = connection, stage
        self._answers: list[Any] = []

    def measure(self, mesh: MeshShape) -> None:
        """Begins :meth:`Desk.whole_bytes`."""
        self._ask("whole_bytes", mesh)

    def begin(self, job: Job, last: bool, refused: Refused) -> None:
        """Begins :meth:`Desk.try_to_plan`."""
        self._ask("try_to_plan", job, last, refused)

    def is_done(self, seconds: float) -> bool:
        """Whether what was begun is, within so many seconds; what is heard meanwhile is passed on."""
        while not self._answers and self._connection.poll(seconds):
            self._hear()
        return bool(self._answers)

    def result(self) -> Any:
        """What it came to; waits for it."""
        while not self._answers:
            self._hear()
        answer = self._answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, *question: Any) -> None:
        try:
            self._connection.send(question)
        except OSError as error:
            raise _gone() from error

    def _hear(self) -> None:
        try:
            kind, told = self._connection.recv()
        except (EOFError, OSError) as error:
            raise _gone() from error
        self._stage(told) if kind == "stage" else self._answers.append(told)


class _NobodyAsksError(Exception):
    """The one that asks is gone."""


def _gone() -> StepgraphError:
    return StepgraphError(
        "a process that plans has ended without an answer",
        why="somebody ended it, or the memory of this machine is full",
        do="plan fewer meshes at once",
    )


def _serve(connection: Connection, options: PlanOptions) -> None:
    """What the other process does, until it is ended: by the one that asks, who hears of Ctrl-C as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    desk: Desk | None = None

    def tell(kind: str, told: Any) -> None:
        try:
            connection.send((kind, told))
        except OSError as error:
            raise _NobodyAsksError from error

    with contextlib.suppress(_NobodyAsksError, EOFError):
        while True:
            name, *arguments = connection.recv()
            try:
                desk = desk or Desk(options, partial(tell, "stage"))
                told = getattr(desk, name)(*arguments)
            except _NobodyAsksError:
                raise
            except Exception as error:
                told = _sendable(error)
            if isinstance(told, tuple) and isinstance(told[0], Attempt):
                found, refused = told
                told = replace(found, made=Made(found.plan)), refused  # without its programs
            tell("answer", told)


def _sendable(error: Exception) -> Exception:
    """An error as another process can read it; one that cannot be read there, as text."""
    with contextlib.suppress(Exception):
        error.__cause__ = error.__context__ = None
        return pickle.loads(pickle.dumps(error))
    return StepgraphError("a process that plans has failed", why=traceback.format_exc(limit=-3))
