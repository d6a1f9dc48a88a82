"""One entry point of an engine, compiled for one kind of batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from stepgraph.capture.python_values import PythonValues
from stepgraph.program import roles
from stepgraph.runtime.executor import LoweredProgram, SplitProgram


@dataclass
class Compiled:
    """One entry point for one batch shape: its programs in the order they run, and what they return.

    ``values``: what the code read from Python when it was captured, and what it changes. ``digest``: of
    what was captured, the same on every rank.
    """

    programs: dict[str, LoweredProgram]
    results: Any = None
    split: SplitProgram | None = None
    values: PythonValues = PythonValues()
    digest: int = 0

    @functools.cached_property
    def draws(self) -> bool:
        """Whether it has random operations."""
        split = [self.split.forward] if self.split is not None else []
        programs = [lowered.program for lowered in (*self.programs.values(), *split)]
        return any(isinstance(role, roles.SEEDS) for program in programs for role in program.inputs)

    def release(self) -> None:
        """Lets go of the tensors and graphs that its programs hold; they cannot run again."""
        for lowered in self.programs.values():
            lowered.release()


class SameProgram(Exception):
    """A value that code reads has changed, and what is computed has not."""

    def __init__(self, compiled: Compiled, values: PythonValues) -> None:
        super().__init__()
        self.compiled, self.values = compiled, values


def that_holds(
    compiled: Sequence[Compiled], as_captured: Callable[[], AbstractContextManager]
) -> Compiled | None:
    """The first for which all that its capture read from Python is what it was.

    Args:
        as_captured: within it the model is as it is captured; entered where something was written to.
    """
    for one in compiled:
        if one.values.untouched():
            return one
    with as_captured():
        found = next((one for one in compiled if one.values.hold()), None)
    if found is not None:
        found.values.remember()
    return found
