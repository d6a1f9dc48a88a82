"""A run while it runs: its progress on standard error, its metrics in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from stepgraph.cli.metrics import StepMetrics, keep_up_to


class Watch:
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
        self.steps, self.metrics, self.show = steps, metrics, show
        self.console = Console(stderr=True, quiet=not show)
        self.every = max(1, steps // 10)
        self.resumed_at = resumed_at
        self.stack = contextlib.ExitStack()
        self.file: IO[bytes] | None = None
        self.progress: Progress | None = None

    def __enter__(self) -> Watch:
        if self.show and self.metrics is not None:
            if self.resumed_at is not None and Path(self.metrics).is_file():
                keep_up_to(Path(self.metrics), self.resumed_at)
            self.file = self.stack.enter_context(open(self.metrics, "ab"))
        if self.console.is_terminal and self.show:
            self.stack.enter_context(self._bar())
        else:
            self.console.print("compiling the first step")
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    @contextlib.contextmanager
    def _bar(self) -> Iterator[None]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as self.progress:
            self.task = self.progress.add_task("compiling", total=None, numbers="")
            yield

    def say(self, text: str) -> None:
        """A line on standard error, above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

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


class Stages:
    """The stages of planning on standard error: a bar on a terminal, else a line for each.

    Args:
        total: how many stages there will be, as far as is known.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.console = Console(stderr=True)
        self.stack = contextlib.ExitStack()
        self.progress: Progress | None = None

    def __enter__(self) -> Stages:
        if self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
            )
            made = Progress(*columns, console=self.console, transient=True)
            self.progress = self.stack.enter_context(made)
            self.task = self.progress.add_task("building the model", total=self.total)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

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
