"""The passes of the schedule room on a placed Program, each told what ``auto`` decides for it."""

from __future__ import annotations

from stepgraph.planning.target import Target
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass
from stepgraph.schedule.apply import decide_and_apply
from tests.support import HOST


def rescheduled(program: Program, *passes: Pass, target: Target = HOST) -> Program:
    """The Program behind some passes, every invariant checked after each; it stays as it is."""
    driver = PassDriver(invariants=True)
    return decide_and_apply(program.copy(), "auto", target, passes, driver)[1]
