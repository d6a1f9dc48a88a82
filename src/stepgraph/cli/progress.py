"""A run while it runs: its progress on standard error, its metrics in a file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from stepgraph.errors import UsageError
from stepgraph.planning import reading
from stepgraph.planning.reading import WHOLE
from stepgraph.runtime.files import whole_file


class StepMetrics(reading.Strict, frozen=True):
    """One line of the metrics file; its time and rate are the step's, compilation included.

    ``loss`` is null in the file where it is no number.
    """

    step: reading.Count
    loss: reading.AnyNumber | None
    tokens_per_second: reading.Number
    peak_bytes: reading.Count
    seconds: reading.Number

    def to_line(self) -> bytes:
        """The line, its end included."""
        return msgspec.json.encode(self) + b"\n"


def keep_up_to(path: Path, step: int) -> None:
    """Removes from the end of a metrics file what was written after a step, and a torn last line.

    Raises:
        UsageError: a line from which this would have to be known is none of a metrics file.
    """
    kept = path.read_bytes().splitlines(keepends=True)
    if kept and not kept[-1].endswith(b"\n"):
        kept.pop()
    while kept and _step_of(kept[-1], f"{path}:{len(kept)}") > step:
        kept.pop()
    with whole_file(path) as unfinished:
        unfinished.write_bytes(b"".join(kept))


def _step_of(line: bytes, where: str) -> int:
    try:
        return reading.convert(reading.parse_json(line), StepMetrics).step
    except reading.MalformedError as error:
        raise UsageError(
            "--resume cannot go on with this file of metrics: a line is not a step's",
            where=where,
            why=error.problem if error.where == WHOLE else f"{error.where}: {error.problem}",
            do="give another file to --metrics, or remove the line",
        ) from error


class _Shown:
    """Progress on standard error: a bar on a terminal; in a log file, lines that a subclass prints."""

    def __init__(self, show: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not show)
        self.stack = contextlib.ExitStack()
        self.progress: Progress | None = None

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    def say(self, text: str) -> None:
        """A line on standard error, above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show_bar(self, description: str, total: int | None, *more: TextColumn) -> None:
        """Shows a bar, ``more`` between it and the time."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *more)
        made = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=not more)
        self.progress = self.stack.enter_context(made)
        self.task = made.add_task(description, total=total, numbers="")


class Watch(_Shown):
    """Progress on standard error, metrics in their file.

    A terminal gets a bar; a log file gets a line now and then.

    Args:
        steps: how many there will be.
        metrics: a file to append to, one line of JSON a step.
        show: false on ranks other than the first: nothing is shown or written.
        resumed_at: steps taken before, where this run goes on from a save (or, with 0, found none):
            what the file says of later ones is removed first.
    """

    def __init__(
        self, steps: int, metrics: str | None, *, show: bool, resumed_at: int | None = None
    ) -> None:
        super().__init__(show)
        self.steps, self.metrics, self.show = steps, metrics, show
        self.every = max(1, steps // 10)
        self.resumed_at = resumed_at
        self.file: IO[bytes] | None = None

    def __enter__(self) -> Watch:
        if self.show and self.metrics is not None:
            if self.resumed_at is not None and Path(self.metrics).is_file():
                keep_up_to(Path(self.metrics), self.resumed_at)
            self.file = self.stack.enter_context(open(self.metrics, "ab"))
        if self.console.is_terminal and self.show:
            self.show_bar("compiling", None, TextColumn("{task.fields[numbers]}"))
        else:
            self.console.print("compiling the first step")
        return self

    def step(self, done: StepMetrics) -> None:
        """Shows and records a step."""
        if self.file is not None:
            self.file.write(done.to_line())
            self.file.flush()
        numbers = (
            f"loss {done.loss:.3f}  {done.tokens_per_second:,.0f} tokens/s  "
            f"{done.peak_bytes / 2**30:.2f} GiB"
        )
        if self.progress is not None:
            self.progress.update(
                self.task,
                description=f"step {done.step}/{self.steps}",
                total=self.steps,
                completed=done.step,
                numbers=numbers,
            )
        elif done.step in (1, self.steps) or done.step % self.every == 0:
            self.console.print(f"step {done.step}/{self.steps}  {numbers}", highlight=False)


class Stages(_Shown):
    """The stages of planning on standard error: a bar on a terminal, else a line for each.

    ``total``: how many there will be, as far as is known.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.done = total, 0

    def __enter__(self) -> Stages:
        if self.console.is_terminal:
            self.show_bar("building the model", self.total)
        return self

    def begin(self, name: str) -> None:
        """A stage begins, and the one before is done."""
        self.done += 1
        if self.progress is None:
            self.console.print(name, highlight=False)
        else:
            self.total = max(self.total, self.done)
            self.progress.update(
                self.task, description=name, completed=self.done - 1, total=self.total
            )
