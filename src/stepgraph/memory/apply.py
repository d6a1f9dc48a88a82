"""Applies a memory decision."""

from collections.abc import Sequence

from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass


def apply(
    program: Program, decision: MemoryDecision, passes: Sequence[Pass], driver: PassDriver
) -> Program:
    """Keeps for the backward what was decided; in place.

    Args:
        passes: of this room, in order.
    """
    return driver.through(passes, program, decision=decision)
