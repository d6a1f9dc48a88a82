"""The pass driver: gives each pass its name in logs, timings, invariants and bisect."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepgraph.program.invariants import check_invariants
from stepgraph.program.program import Program
from stepgraph.program.text import program_text

log = logging.getLogger("stepgraph")

Pass = Callable[..., Program]


@dataclass
class PassRecord:
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
        observe: called as ``observe(pass name, before, after, arguments)``; gets copies it may keep.
        replaced: passes to run in place of others, by name (tests plant bugs with it).
    """

    invariants: bool = False
    keep_text: bool = False
    observe: Callable[[str, Program, Program, tuple], None] | None = None
    replaced: dict[str, Pass] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)

    def run(self, rewrite: Pass, program: Program, *args: Any) -> Program:
        """Applies one pass; it may rewrite ``program`` in place."""
        name = rewrite.__name__
        before = program.copy() if self.observe is not None else None
        start = time.perf_counter()
        program = self.replaced.get(name, rewrite)(program, *args)
        seconds = time.perf_counter() - start
        text = None
        if self.keep_text:
            text = program_text(program, f"after {name}, {seconds * 1e3:.0f} ms")
        self.records.append(PassRecord(program.name, name, seconds, text))
        log.debug("%s: %s took %.0f ms", program.name, name, seconds * 1e3)
        if self.invariants:
            check_invariants(program, after=name)
        if self.observe is not None and before is not None:
            self.observe(name, before, program.copy(), args)
        return program
