"""Under a search for what is kept, only placements are asked of a contest: nothing whole is made for it.

Where the layers of a deep step repeat, two steps of few layers say what it takes under the solver's answer
and under presets; what leads is the placement that a search begins with, and what that finds is simulated
whole. Where answers that short steps cannot tell apart may differ by more than a solver's gap, nothing is
said here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from stepgraph.contest import (
    MANY,
    Contest,
    Entrant,
    Foreseen,
    in_rank,
    predicted,
    promising,
    rivals,
    taken,
)
from stepgraph.cost.collectives import links
from stepgraph.cost.short_steps import Said, ShortSteps, short_steps
from stepgraph.errors import StepgraphError
from stepgraph.pipeline import Made, form, in_order, make, place
from stepgraph.placement.presets.beside_data import SEQUENCE_PARALLEL
from stepgraph.placement.solver.room import Room
from stepgraph.planning.decisions import Decisions, PlacementDecision, Table
from stepgraph.planning.plan import Plan, named_values
from stepgraph.planning.request import AUTO
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program

_CLOSE = 0.01  # a gap that a solver is content with where a memory limit binds


def placed(programs: Mapping[str, Program], plan: Plan, room: Room | None = None) -> Plan:
    """A plan with the placements of programs, which stay as they are, and no other decision.

    Args:
        room: what a solver may hold; by default, what the request gives it.
    """
    for name, program in in_order(programs):
        formed = form(program.copy(), plan, PassDriver())
        where = place(formed, plan, room)
        plan = plan.with_decisions(plan.new_key(name), Decisions(where))
    return plan


def leader(contest: Contest, room: Room) -> tuple[Plan, Entrant | None]:
    """A solver's placements, and what takes least time of those that fit, by short steps.

    None: they do not surely say. A solver's first answer is looked at, and is improved only where all that
    it has not certified could make it the best.

    Args:
        room: what a solver may hold.
    """
    asked = contest.plan.request.constraints  # of values that a short step may not have
    names = [] if asked else rivals(contest.programs, contest.plan)
    deep = len(contest.programs["step"].graph.nodes) > MANY
    short = short_steps(contest.programs) if names and deep else None
    hasty = replace(room, hasty=short is not None)
    own = placed(contest.programs, contest.plan, hasty)
    said = short and _foreseen(own, short, contest)
    if short is None:
        return own, None
    if said is None:
        return placed(contest.programs, contest.plan, room), None
    solver = Entrant(AUTO, Made(own), said.whole)
    others = promising(solver, _lean(names), contest) or promising(solver, names, contest)
    gap = max(decided.placement.optimality_gap or 0.0 for decided in own.decisions.values())
    if gap > _CLOSE and not _beaten(said, gap, others, contest.budget):
        improved = placed(contest.programs, contest.plan, room)
        better = _foreseen(improved, short, contest)
        again = better and Entrant(AUTO, Made(improved), better.whole)
        if again and in_rank([solver, again], contest.budget)[0] is again:
            own, said = improved, better
    return own, said and _leads(own, said, others, contest)


def _lean(names: Sequence[str]) -> list[str]:
    """Presets without those that keep whole sequences where another divides them.

    That sends as many bytes, and never holds more: where memory is short the others do not lead.
    """
    beside = f"+{SEQUENCE_PARALLEL}"
    whole = {name.replace(beside, "", 1) for name in names if beside in name}
    return [name for name in names if name not in whole]


def _beaten(own: Said, gap: float, others: Sequence[Foreseen], budget: int) -> bool:
    """Whether a preset that fits takes less than a solver's answer without its gap."""
    sure = [o.said.whole for o in others if o.said and o.said.exact]
    fitting = (whole.step_ms for whole in sure if whole.peak_bytes <= budget)
    return min(fitting, default=inf) < own.whole.step_ms * (1 - gap)


def _leads(plan: Plan, own: Said, others: Sequence[Foreseen], contest: Contest) -> Entrant | None:
    """The best, with its placements; None where another may be clearly better, or it cannot be placed."""
    said = {AUTO: own, **{other.name: other.said for other in others if other.said}}
    if len(said) <= len(others):
        return None
    entrants = [
        Entrant(name, Made(plan if name == AUTO else contest.plan), one.whole)
        for name, one in said.items()
    ]
    best, *rest = in_rank(entrants, contest.budget)
    time = best.predicted.step_ms
    least = min((said[e.name].least_ms for e in rest if not said[e.name].exact), default=inf)
    if least < time * (1 - _CLOSE):
        return None
    if not said[best.name].exact or least < time:  # about as fast: who holds less has more to gain
        solver = entrants[0].predicted
        if solver.step_ms * (1 - _CLOSE) < time and solver.peak_bytes < best.predicted.peak_bytes:
            return entrants[0]
    if best is not entrants[0] and not _place(best, contest):
        return None
    return taken(entrants, contest.budget)


def _place(entrant: Entrant, contest: Contest) -> bool:
    """Gives a preset's answer its placements; whether that can be."""
    request = contest.plan.request
    preset = replace(contest.plan, request=replace(request, placement=entrant.name))
    try:
        preset = placed(contest.programs, preset)
    except StepgraphError:
        return False
    entrant.made.plan = replace(preset, request=request)
    return True


def _foreseen(plan: Plan, short: ShortSteps, contest: Contest) -> Said | None:
    """What a step takes under placements; None: short ones cannot say."""
    found = []
    for programs in short.programs:
        of_short = _of_short(plan, programs)
        if of_short is None:
            return None
        try:
            asked = {"strict": contest.strict, "logits": contest.logits}
            made = make(programs, of_short, contest.target, contest.rank, **asked)
        except StepgraphError:
            return None
        found.append(predicted(made, contest.device, keep=False))
    few, more = found
    return short.say(few, more, links(plan.mesh, contest.device))


def _of_short(plan: Plan, programs: Mapping[str, Program]) -> Plan | None:
    """Placements of a deep step for one of few of its layers; None where that has other values."""
    decisions = {}
    for key, decided in plan.decisions.items():
        formed = form(programs[key].copy(), plan, PassDriver())
        where = _some(decided.placement, named_values(formed))
        if where is None:
            return None
        decisions[key] = Decisions(where)
    return replace(plan, decisions=Table(decisions))


def _some(decision: PlacementDecision, names: set[str]) -> PlacementDecision | None:
    """A placement decision for some of the values that it names; None where it lacks one."""
    tables = {
        what: {name: one for name, one in getattr(decision, what).items() if name in names}
        for what in ("inputs", "outputs", "operations")
    }
    if not names <= {name for table in tables.values() for name in table}:
        return None
    return replace(decision, **tables, reasons={})
