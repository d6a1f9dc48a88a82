"""The metrics of a run: one line of JSON a step, read again where a run is resumed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepgraph.errors import UsageError
from stepgraph.planning.reading import (
    WHOLE,
    AnyNumber,
    Count,
    MalformedError,
    Number,
    Strict,
    convert,
    parse_json,
)
from stepgraph.runtime.files import whole_file


class StepMetrics(Strict, frozen=True):
    """One line of the metrics file; its time and rate are the step's, compilation included.

    ``loss`` is null in the file where it is no number.
    """

    step: Count
    loss: AnyNumber | None
    tokens_per_second: Number
    peak_bytes: Count
    seconds: Number

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
        return convert(parse_json(line), StepMetrics).step
    except MalformedError as error:
        raise UsageError(
            "--resume cannot go on with this file of metrics: a line is not a step's",
            where=where,
            why=error.problem if error.where == WHOLE else f"{error.where}: {error.problem}",
            do="give another file to --metrics, or remove the line",
        ) from error
