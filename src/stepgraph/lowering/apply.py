"""Applies a lowering decision: a bound Program writes its state in place, and becomes a callable."""

from collections.abc import Mapping, Sequence

from stepgraph.lowering.presets import LOWERINGS
from stepgraph.lowering.record import Executable
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.planning.target import Target
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass


def apply(
    program: Program,
    name: str,
    groups: Mapping[str, str],
    passes: Sequence[Pass],
    driver: PassDriver,
) -> Program:
    """What is executed of one rank's Program, in place: it is not functional any more.

    Args:
        name: of the lowering.
        groups: names of mesh dimensions -> names of the rank's process groups.
        passes: of this room, in order.
    """
    return driver.through(passes, program, groups=groups, fuses=LOWERINGS[name].fuses)


def prepare(name: str, target: Target) -> None:
    """Begins what a lowering can do before there is a Program, beside whatever comes next."""
    LOWERINGS[name].prepare(target)


def lower(program: Program, decision: LoweringDecision, target: Target) -> Executable:
    """Makes a Program executable: a callable from local inputs to local results.

    Args:
        program: of one rank; what its collectives and waits are, and in which order, is final.
    """
    return LOWERINGS[decision.name].make(program, target)
