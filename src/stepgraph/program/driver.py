"""The pass driver: gives each pass its name in logs, timings, invariants and bisect."""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgraph.program.invariants import check_invariants
from stepgraph.program.program import Program
from stepgraph.program.record import Pass, Rewrite
from stepgraph.program.text import program_text

log = logging.getLogger("stepgraph")

Observer = Callable[[Pass, Program, Program, Mapping[str, Any]], None]


@dataclass
class PassRun:
    """One pass that ran: on which program, for how long (seconds), and the text after it, if kept."""

    program: str
    name: str
    seconds: float
    text: str | None = None


@dataclass
class PassDriver:
    """Runs passes one by one.

    Args:
        invariants: check every invariant after each pass.
        keep_text: keep the program's text after each pass.
        observe: called as ``observe(pass, before, after, arguments)``; gets copies it may keep.
        replaced: rewritings to run in place of passes', by name (tests plant bugs with it).
    """

    invariants: bool = False
    keep_text: bool = False
    observe: Observer | None = None
    replaced: dict[str, Rewrite] = field(default_factory=dict)
    runs: list[PassRun] = field(default_factory=list)

    def through(self, road: Sequence[Pass], program: Program, **given: Any) -> Program:
        """Applies the passes of a stretch of road in order.

        Args:
            given: the road's arguments; each pass takes those that it names.
        """
        for step in road:
            program = self.run(step, program, **{name: given[name] for name in step.takes})
        return program

    def run(self, step: Pass, program: Program, **arguments: Any) -> Program:
        """Applies one pass; it may rewrite ``program`` in place."""
        before = program.copy() if self.observe is not None else None
        start = time.perf_counter()
        program = self.replaced.get(step.name, step.rewrite)(program, **arguments)
        seconds = time.perf_counter() - start
        text = None
        if self.keep_text:
            text = program_text(program, f"after {step.name}, {seconds * 1e3:.0f} ms")
        self.runs.append(PassRun(program.name, step.name, seconds, text))
        log.debug("%s: %s took %.0f ms", program.name, step.name, seconds * 1e3)
        if self.invariants and step.functional:
            check_invariants(program, after=step.name)
        if self.observe is not None and before is not None:
            self.observe(step, before, program.copy(), arguments)
        return program


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No search for garbage in a heap of a million nodes that all live on.

    Nor behind it, where they would all be young: they are searched when all that is old is.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what a user has frozen stays so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
