"""Decides how a Program executes."""

from stepgraph.errors import LoweringError
from stepgraph.lowering.presets import LOWERINGS, check_lowering
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.planning.target import Target
from stepgraph.program.program import Program


def decide(program: Program, name: str, target: Target) -> LoweringDecision:
    """The lowering that was asked for; where it cannot execute the Program, the next best, and why.

    Raises:
        UsageError: unknown lowering.
        LoweringError: none can.
    """
    check_lowering(name)
    refused: list[str] = []
    names = list(LOWERINGS)
    for candidate in names[names.index(name) :]:
        obstacles = LOWERINGS[candidate].obstacles(program, target)
        if not obstacles:
            instead = f"; it runs under {candidate}" if refused else ""
            return LoweringDecision(candidate, "; ".join(refused) + instead)
        refused.append(f"{candidate} cannot run program {program.name!r}: {obstacles[0]}")
    raise LoweringError(f"no lowering can run program {program.name!r}", why="; ".join(refused))
