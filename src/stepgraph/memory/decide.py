"""Whether each forward value is kept for the backward: by a named policy, or what a budget allows."""

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from stepgraph.analysis.blocks import find_blocks
from stepgraph.cost.device import Device
from stepgraph.cost.memory import CATEGORIES, memory_timeline
from stepgraph.cost.predict import Trial
from stepgraph.errors import BudgetError, MemoryPolicyError
from stepgraph.memory.by_policy import decide_by_policy
from stepgraph.memory.passes.offload_states import names_of_states, offload_states, states_of
from stepgraph.memory.pieces import fewer_and_fewer, find_pieces, most_pieces, said
from stepgraph.memory.presets import FULL, NONE, budget_of, parse_policy
from stepgraph.memory.solver.blocks import Blocks
from stepgraph.memory.solver.frontiers import best_of, spread
from stepgraph.memory.solver.profile import MANY, Profile, Simulate, between
from stepgraph.memory.solver.search import Search, fastest
from stepgraph.planning.decisions import FrontierPoint, MemoryDecision
from stepgraph.planning.request import AUTO, is_searched
from stepgraph.planning.sizes import show_bytes, show_bytes_up
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import BACKWARD, Program

# Under which a solver of placements looks for one, in this order: the first whose peak fits. What is kept
# where they have put it is searched for afterwards.
CANDIDATES = (NONE, FULL)
# How logits are under a named policy that a budget is said beside: in pieces where it does not fit with
# whole ones; whole, as it stands for a search; or in pieces, as it is a short step of what may not fit.
WEIGHED, WHOLE, DIVIDED = "weighed", "whole", "divided"
_SLOWER = 1.01  # is no reason for more pieces, and may be lost by them where all else is kept
_ROOM = 1.1  # a peak before a Program is scheduled, over its budget: then it does not fit


def check_memory(policy: str) -> None:
    """Raises UsageError for an unknown policy; the message lists the known ones."""
    parse_policy(policy)


def candidates(policy: str) -> tuple[str, ...]:
    """The policies that one stands for while placements are searched for."""
    return CANDIDATES if is_searched(policy) else (policy,)


def leanest(policy: str) -> str:
    """The named policy that keeps least of those that one stands for."""
    return candidates(policy)[-1]


@dataclass
class Means:
    """What a search has to go by, and what it has found of one placed Program.

    Args:
        simulate: what the Program takes under a decision.
        device: whose costs count.
        fused: whether operations are fused into kernels.
        budget: bytes of a rank that are said beside the policy; None: the device's.
        counted: of a budget, the bytes of predictions that it has room for.

    Attributes:
        found: what the Program takes under what was decided; None: that is not searched for.
    """

    simulate: Simulate
    device: Device
    fused: bool
    budget: int | None = None
    counted: Callable[[int], int] = int
    found: Trial | None = None
    _searches: dict[tuple, Search] = field(default_factory=dict, repr=False)

    @property
    def limit(self) -> int:
        """Bytes that a rank has for a step."""
        return self.counted(self.budget or self.device.capacity)

    def budget_for(self, policy: str) -> int:
        """Bytes that a rank has under a policy that may name its own."""
        return self.counted(budget_of(policy, self.budget) or self.device.capacity)

    def search(
        self, program: Program, gather_again: bool, pieces: Mapping[str, int] | None = None
    ) -> Search:
        """Candidates for a Program; made once.

        Args:
            pieces: into which logits are divided.
        """
        key = tuple((pieces or {}).items())
        if key not in self._searches:

            def simulate(program: Program, decision: MemoryDecision) -> Trial:
                return self.simulate(program, replace(decision, pieces=pieces))

            self._searches[key] = Search(self._profile(program, gather_again, simulate, pieces))
        return self._searches[key]

    def _profile(
        self,
        program: Program,
        gather_again: bool,
        simulate: Simulate,
        pieces: Mapping[str, int] | None,
    ) -> Profile:
        """Of a deep step, only what its head takes is simulated anew where logits are divided."""
        if pieces and len(program.graph.nodes) > MANY:
            whole = self.search(program, gather_again).profile
            if whole.is_deep:
                known = [
                    (most_pieces(dict(key)), s.profile) for key, s in self._searches.items() if key
                ]
                if len(known) > 1:  # of most and of fewest pieces
                    return between(simulate, most_pieces(pieces), *known[:2])
                divided = known[0][1] if known else whole
                return divided.with_head(simulate, both=not known)
        return Profile(program, gather_again, simulate, self.device, self.fused)


def decide(
    program: Program,
    policy: str,
    gather_again: bool = True,
    means: Callable[[], Means] | None = None,
    logits: str = WEIGHED,
    away: tuple[str, ...] | None = None,
) -> MemoryDecision:
    """Which forward values of a (placed) Program are recomputed; it stays as it is.

    Args:
        policy: a named one (:func:`decide_by_policy`); ``budget:SIZE``: what takes least time while the
            simulated peak of what runs stays within so many bytes a rank; ``auto``: within all that a rank
            has.
        gather_again: gathered parameters are not kept for the backward.
        means: of a search, and of a named policy that a budget is said beside.
        logits: how they are under such a policy.
        away: optimizer states that another program of the step has on the host, where that is decided.

    Raises:
        UsageError: unknown policy.
        MemoryPolicyError: ``layers:N`` where no block repeats.
        BudgetError: nothing fits; ``smallest`` is the smallest peak.
    """
    if not is_searched(policy):
        kept = decide_by_policy(program, policy, gather_again)
        if means is None or policy == NONE or logits == WHOLE:
            return kept
        return _divided(program, kept, means(), logits)
    parse_policy(policy)
    if next(program.operations(BACKWARD), None) is None:  # nothing is kept in any case
        kept = replace(decide_by_policy(program, NONE, gather_again), policy=policy)
        if states := tuple(one for one in names_of_states(program) if one in (away or ())):
            return replace(kept, offload=states)
        return kept if means is None else _evaluated(program, kept, means())
    if means is None:
        raise MemoryPolicyError(
            f"memory policy {policy!r} needs a step that is captured as one program",
            why="it simulates the whole step under each decision",
            do="use a named policy: none, ops, full",
        )
    known = means()
    if away is None:
        return _search(program, policy, gather_again, known)
    found, known.found = _with_states_away(program, policy, gather_again, known, away)
    return found


def decide_for_graph(program: Program, policy: str, gather_again: bool) -> MemoryDecision:
    """:func:`decide` for one graph of many: ``layers:N`` is ``none`` where no block of it repeats."""
    if parse_policy(policy)[0] == "layers" and not find_blocks(program):
        policy = NONE
    return decide(program, policy, gather_again)


def frontier(program: Program, gather_again: bool, means: Means) -> tuple[FrontierPoint, ...]:
    """About a dozen ways to run a placed Program, from the least memory to the least time."""
    points = means.search(program, gather_again).frontier()
    if not (pieces := find_pieces(program, means.limit)):
        return points
    divided = means.search(program, gather_again, pieces).frontier()
    divided = [replace(point, keeps=point.keeps + said(pieces)) for point in divided]
    return spread(best_of([*points, *divided]))


def _evaluated(program: Program, kept: MemoryDecision, means: Means) -> MemoryDecision:
    """Without a backward there is nothing to keep; logits are whole where they fit."""
    budget = means.budget_for(kept.policy)
    if memory_timeline(program, means.fused).peak() <= budget:
        return kept
    return replace(kept, pieces=find_pieces(program, budget) or None)


def _divided(program: Program, kept: MemoryDecision, means: Means, logits: str) -> MemoryDecision:
    """A named policy, with logits in pieces where it does not fit with whole ones; it need not with any.

    Of those that take hardly more time than the fastest that fits, what holds least is taken.
    """
    budget = means.limit
    if not (enough := find_pieces(program, budget)):
        return kept
    if logits == DIVIDED:
        return replace(kept, pieces=enough)

    def tried(pieces: Mapping[str, int] | None) -> tuple[MemoryDecision, Trial]:
        decision = replace(kept, pieces=pieces)
        return decision, means.simulate(program, decision)

    found = [tried(None)]
    if _fits(found[-1], budget):
        return kept
    found.append(tried(enough))
    if _fits(found[-1], budget):
        for fewer in [*fewer_and_fewer(enough)][1:]:
            last, now = found[-1], tried(fewer)
            if not _fits(now, budget) or now[1].seconds * _SLOWER > last[1].seconds:
                break
            found.append(now)
    if len(found) == 2:  # fewer are no faster
        finer = [find_pieces(program, budget // part) for part in (2, 4)]
        found += map(tried, {most_pieces(some): some for some in finer if some != enough}.values())
    if fitting := [one for one in found if _fits(one, budget)]:
        most = _SLOWER * min(trial.seconds for _, trial in fitting)
        found = [one for one in fitting if one[1].seconds <= most]
    decision, trial = min(found, key=lambda one: one[1].memory.peak())
    if decision.pieces is None:
        return kept
    peak, of = show_bytes(trial.memory.peak()), show_bytes(budget)
    reason = f"memory {kept.policy}{said(decision.pieces)}: {peak} of {of}"
    return replace(decision, reason=reason)


def _fits(one: tuple[MemoryDecision, Trial], budget: int) -> bool:
    return one[1].memory.peak() <= budget


def _search(program: Program, policy: str, gather_again: bool, means: Means) -> MemoryDecision:
    """What is best kept; where nothing fits, with optimizer states on the host: all, or what that takes."""
    try:
        return _kept(program, policy, gather_again, means)
    except BudgetError as error:
        missing = (error.smallest or 0) - means.budget_for(policy)
        if means.device.host is None or not states_of(program):
            raise
    every, asked = names_of_states(program), (program, policy, gather_again, means)
    found, trial = _with_states_away(*asked, every)
    if len(some := names_of_states(program, _ROOM * missing)) < len(every):
        with contextlib.suppress(BudgetError):
            fewer, other = _with_states_away(*asked, some)
            if other.seconds <= trial.seconds:
                found, trial = fewer, other
    means.found = trial
    return found


def _with_states_away(
    program: Program, policy: str, gather_again: bool, means: Means, states: tuple[str, ...]
) -> tuple[MemoryDecision, Trial]:
    away, others = MemoryDecision(NONE, offload=states), replace(means, found=None, _searches={})
    program = PassDriver().run(offload_states, program.copy(), decision=away)
    kept = _kept(program, policy, gather_again, others)
    assert others.found is not None
    offload = tuple(sorted((*(kept.offload or ()), *states)))
    more = f"; {len(states)} optimizer states wait on the host" if states else ""
    return replace(kept, offload=offload or None, reason=f"{kept.reason}{more}"), others.found


def _kept(program: Program, policy: str, gather_again: bool, means: Means) -> MemoryDecision:
    asked = program, policy, gather_again, means, (budget := means.budget_for(policy))
    if kept := _all_kept(*asked):
        return kept
    pieces = find_pieces(program, budget)
    short = len(program.graph.nodes) <= MANY  # else a search takes less than several trials
    if short and pieces and (kept := _all_kept(*asked, pieces)):
        return kept
    searches: dict[Search, Mapping[str, int] | None] = {}
    enough = inf  # seconds, if all is recomputed, in pieces with which what is fastest fits
    for way, seconds in (ways := _ways(program, gather_again, means, budget, pieces)):
        if seconds * _SLOWER > enough:
            continue
        search = means.search(program, gather_again, way)
        searches[search] = way
        if way and search.candidates[0].peak <= budget:
            enough = min(enough, seconds)
    found = fastest([*searches], budget)
    if found is None:
        every = [*(way for way, _ in ways), find_pieces(program, 0) or None]
        if any(means.search(program, gather_again, way) not in searches for way in every):
            searches = {means.search(program, gather_again, way): way for way in every}
            found = fastest([*searches], budget)
    if found is None:
        search = min(searches, key=Search.smallest)
        raise _too_small(search, budget, search.smallest(), policy)
    search, mix = found
    profile, divided = search.profile, searches[search]
    kept, trial = profile.decision(policy, mix), profile.trial(mix)
    if divided and not profile.is_deep:
        divided, trial = _fewest(program, replace(kept, pieces=divided), means, budget, trial)
    means.found = trial
    reason = (
        f"memory {policy}: {search.describe(mix)}{said(divided)}; "
        f"{show_bytes(trial.memory.peak())} of {show_bytes(budget)}, and {trial.seconds * 1e3:.4g} ms"
    )
    return replace(kept, reason=reason, pieces=divided)


def _ways(
    program: Program, gather_again: bool, means: Means, budget: int, pieces: Mapping[str, int]
) -> list[tuple[Mapping[str, int] | None, float]]:
    """Logits whole and in fewer and fewer pieces; seconds that a step under ``full`` takes, 0: not known.

    Of a deep step all of them, the fewest second: others are between. Else, as a search takes long,
    those with which recomputing everything may fit, whole ones first; finer ones where those may not.
    """
    if not pieces:
        return [(None, 0.0)]
    ways = [*fewer_and_fewer(pieces), None]
    if len(program.graph.nodes) > MANY and means.search(program, gather_again).profile.is_deep:
        most, *fewer, whole = ways
        return [(way, 0.0) for way in (whole, most, *fewer[-1:], *fewer[:-1])]
    full = decide_by_policy(program, FULL, gather_again)
    trials = ((way, means.simulate(program, replace(full, pieces=way))) for way in ways)
    fitting = itertools.takewhile(lambda one: one[1].memory.peak() <= _ROOM * budget, trials)
    found = [(way, trial.seconds) for way, trial in fitting][::-1] or [(pieces, 0.0)]
    finer = find_pieces(program, budget // 4)
    if found[0][0] is not None and finer != pieces:
        found.append((finer, means.simulate(program, replace(full, pieces=finer)).seconds))
    return found


def _fewest(
    program: Program, decision: MemoryDecision, means: Means, budget: int, trial: Trial
) -> tuple[Mapping[str, int], Trial]:
    """As few pieces as fit and hardly take longer, and what the Program takes with them."""
    pieces, *more = fewer_and_fewer(decision.pieces or {})
    for fewer in more:
        other = means.simulate(program, replace(decision, pieces=fewer))
        if other.memory.peak() > budget or other.seconds > _SLOWER * trial.seconds:
            break
        pieces, trial = fewer, other
    return pieces, trial


def _all_kept(
    program: Program,
    policy: str,
    gather_again: bool,
    means: Means,
    budget: int,
    pieces: Mapping[str, int] | None = None,
) -> MemoryDecision | None:
    """Everything is kept, where it fits: only keeping what is gathered again could take less time.

    Where logits are in pieces, it must not take much longer than with whole ones, too, nor have more than
    two: fewer, where less is kept, may take less time.
    """
    blocks = Blocks(program, gather_again)
    if blocks.gathers or (
        not pieces and memory_timeline(program, means.fused).peak() > _ROOM * budget
    ):
        return None
    whole = replace(decide_by_policy(program, NONE, gather_again), policy=policy)
    decision = replace(whole, pieces=pieces)
    trial = means.simulate(program, decision)
    if trial.memory.peak() > budget:
        return None
    if pieces:
        pieces, trial = _fewest(program, decision, means, budget, trial)
        if (
            most_pieces(pieces) > 2
            or trial.seconds > _SLOWER * means.simulate(program, whole).seconds
        ):
            return None
    means.found = trial
    kept, peak = f"all is kept{said(pieces)}", trial.memory.peak()
    reason = f"memory {policy}: none; {kept}, in {show_bytes(peak)} of {show_bytes(budget)}"
    return replace(decision, reason=reason, pieces=pieces)


def _too_small(search: Search, budget: int, smallest: int, policy: str) -> BudgetError:
    known = search.profile.known
    mix = min(known, key=lambda one: known[one].memory.peak())
    line = known[mix].memory
    alive = max(line.at, key=lambda sizes: sum(sizes.values()))
    name = max(CATEGORIES, key=lambda category: alive.get(category, 0))
    where = "" if policy == AUTO else f"memory {policy}, "
    error = BudgetError(
        f"no plan fits {show_bytes(budget)} a rank: the smallest peak is {show_bytes_up(smallest)}",
        where=f"{where}program {search.profile.program.name!r}",
        why=f"at the peak of {search.describe(mix)}, {name} take {show_bytes(alive[name])}",
        do=f"give at least {show_bytes_up(smallest)}, more ranks, or fewer rows a rank",
    )
    error.smallest = smallest
    return error
