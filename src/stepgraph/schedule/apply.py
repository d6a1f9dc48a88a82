"""Applies a schedule decision; and decides it, pass by pass, where there is none yet."""

from collections.abc import Sequence

from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.planning.target import Target
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass
from stepgraph.schedule.decide import check_schedule, decide_for


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


def decide(
    program: Program, policy: str, target: Target, passes: Sequence[Pass]
) -> ScheduleDecision:
    """When each collective of a placed Program runs; it stays as it is.

    Args:
        policy: ``none``: as placement left them; ``auto``.
        target: what runs them.
    """
    return decide_and_apply(program.copy(), policy, target, passes, PassDriver())[0]


def decide_and_apply(
    program: Program, policy: str, target: Target, passes: Sequence[Pass], driver: PassDriver
) -> tuple[ScheduleDecision, Program]:
    """:func:`decide`, then :func:`apply`, in place: what a pass is told follows from the one before."""
    check_schedule(policy)
    decision = ScheduleDecision(policy)
    for step in passes:
        decision = decide_for(step.name, program, decision, target)
        program = apply(program, decision, target, (step,), driver)
    return decision, program
