"""Applies a schedule decision."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.planning.target import Target
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass


def apply(
    program: Program,
    decision: ScheduleDecision,
    target: Target,
    passes: Sequence[Pass],
    driver: PassDriver,
) -> Program:
    """Runs collectives when it was decided; in place.

    Args:
        target: waits are not moved where it cannot have several collectives in flight.
        passes: of this room, in order.
    """
    return driver.through(passes, program, decision=decision, overlaps=target.overlaps)
