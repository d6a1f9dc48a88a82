"""Decides how a Program executes."""

from stepgraph.errors import LoweringError, name_a_few
from stepgraph.lowering.graphs.obstacles import no_graphs
from stepgraph.lowering.presets import LOWERINGS, check_lowering
from stepgraph.lowering.record import Obstacle
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
        if LOWERINGS[candidate].inner and all(obstacle.node for obstacle in obstacles):
            return LoweringDecision(candidate, _in_pieces(candidate, program, obstacles))
        refused.append(f"{candidate} cannot run program {program.name!r}: {obstacles[0]}")
    raise LoweringError(f"no lowering can run program {program.name!r}", why="; ".join(refused))


def decide_for_graph(program: Program, name: str, target: Target) -> LoweringDecision:
    """:func:`decide` for one graph of many: what captures whole steps gives way to what it captures."""
    check_lowering(name)
    if not (inner := LOWERINGS[name].inner):
        return decide(program, name, target)
    instead = f"{name} captures steps that are one program: graph by graph it runs under {inner}"
    return LoweringDecision(inner, instead)


def check_target(name: str, target: Target) -> None:
    """Refuses a lowering that captures graphs where a kind of device has none.

    Raises:
        UsageError: unknown lowering.
        LoweringError: what to ask for instead.
    """
    check_lowering(name)
    if not LOWERINGS[name].inner or target.graphs:
        return
    refused = no_graphs(target)
    raise LoweringError(f"lowering={name!r} cannot run here", why=refused.why, do=refused.do)


def _in_pieces(name: str, program: Program, obstacles: list[Obstacle]) -> str:
    """What is captured, what is not, and why."""
    told = name_a_few(list(dict.fromkeys(map(str, obstacles))), at_most=3)
    return (
        f"{name}: program {program.name!r} is captured in pieces, and {len(obstacles)} of its operations "
        f"run between them: {told}"
    )
