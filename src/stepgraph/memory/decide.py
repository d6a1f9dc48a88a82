"""Whether each forward value is kept for the backward: by a named policy, or what a budget allows."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stepgraph.analysis.blocks import find_blocks
from stepgraph.cost.device import Device
from stepgraph.cost.memory import CATEGORIES, memory_timeline
from stepgraph.errors import BudgetError, MemoryPolicyError
from stepgraph.memory.by_policy import decide_by_policy
from stepgraph.memory.presets import FULL, NONE, budget_of, parse_policy
from stepgraph.memory.solver.blocks import Blocks
from stepgraph.memory.solver.profile import Profile, Simulate
from stepgraph.memory.solver.search import Search
from stepgraph.planning.decisions import FrontierPoint, MemoryDecision
from stepgraph.planning.request import AUTO, is_searched
from stepgraph.planning.sizes import show_bytes
from stepgraph.program.program import BACKWARD, Program

# Under which a solver of placements looks for one, in this order: the first whose peak fits. What is kept
# where they have put it is searched for afterwards.
CANDIDATES = (NONE, FULL)
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
    """

    simulate: Simulate
    device: Device
    fused: bool
    budget: int | None = None
    _search: Search | None = field(default=None, repr=False)

    def search(self, program: Program, gather_again: bool) -> Search:
        """Candidates for a Program; made once."""
        if self._search is None:
            profile = Profile(program, gather_again, self.simulate, self.device, self.fused)
            self._search = Search(profile)
        return self._search


def decide(
    program: Program,
    policy: str,
    gather_again: bool = True,
    means: Callable[[], Means] | None = None,
) -> MemoryDecision:
    """Which forward values of a (placed) Program are recomputed; it stays as it is.

    Args:
        policy: a named one (:func:`decide_by_policy`); ``budget:SIZE``: what takes least time while the
            simulated peak of what runs stays within so many bytes a rank; ``auto``: within all that a rank
            has.
        gather_again: gathered parameters are not kept for the backward.
        means: of a search.

    Raises:
        UsageError: unknown policy.
        MemoryPolicyError: ``layers:N`` where no block repeats.
        BudgetError: nothing fits; ``smallest`` is the smallest peak.
    """
    if not is_searched(policy):
        return decide_by_policy(program, policy, gather_again)
    parse_policy(policy)
    if next(program.operations(BACKWARD), None) is None:  # nothing is kept in any case
        return replace(decide_by_policy(program, NONE, gather_again), policy=policy)
    if means is None:
        raise MemoryPolicyError(
            f"memory policy {policy!r} needs a step that is captured as one program",
            why="it simulates the whole step under each decision",
            do="use a named policy: none, ops, full",
        )
    return _search(program, policy, gather_again, means())


def decide_for_graph(program: Program, policy: str, gather_again: bool) -> MemoryDecision:
    """:func:`decide` for one graph of many: ``layers:N`` is ``none`` where no block of it repeats."""
    if parse_policy(policy)[0] == "layers" and not find_blocks(program):
        policy = NONE
    return decide(program, policy, gather_again)


def frontier(program: Program, gather_again: bool, means: Means) -> tuple[FrontierPoint, ...]:
    """About a dozen ways to run a placed Program, from the least memory to the least time."""
    return means.search(program, gather_again).frontier()


def _search(program: Program, policy: str, gather_again: bool, means: Means) -> MemoryDecision:
    budget = budget_of(policy, means.budget) or means.device.capacity
    if kept := _all_kept(program, policy, gather_again, means, budget):
        return kept
    search = means.search(program, gather_again)
    mix, smallest = search.within(budget)
    if mix is None:
        raise _too_small(search, budget, smallest, policy)
    profile = search.profile
    trial = profile.trial(mix)
    reason = (
        f"memory {policy}: {search.describe(mix)}; {show_bytes(trial.memory.peak())} of "
        f"{show_bytes(budget)}, and {trial.seconds * 1e3:.4g} ms"
    )
    return replace(profile.decision(policy, mix), reason=reason)


def _all_kept(
    program: Program, policy: str, gather_again: bool, means: Means, budget: int
) -> MemoryDecision | None:
    """Everything is kept, where it fits: only keeping what is gathered again could take less time."""
    blocks = Blocks(program, gather_again)
    if blocks.gathers or memory_timeline(program).peak() > _ROOM * budget:
        return None
    decision = replace(decide_by_policy(program, NONE, gather_again), policy=policy)
    peak = means.simulate(program, decision).memory.peak()
    reason = f"memory {policy}: none; all is kept, in {show_bytes(peak)} of {show_bytes(budget)}"
    return replace(decision, reason=reason) if peak <= budget else None


def _too_small(search: Search, budget: int, smallest: int, policy: str) -> BudgetError:
    known = search.profile.known
    mix = min(known, key=lambda one: known[one].memory.peak())
    line = known[mix].memory
    alive = max(line.at, key=lambda sizes: sum(sizes.values()))
    name = max(CATEGORIES, key=lambda category: alive.get(category, 0))
    where = "" if policy == AUTO else f"memory {policy}, "
    error = BudgetError(
        f"no plan fits {show_bytes(budget)} a rank: the smallest peak is {show_bytes(smallest)}",
        where=f"{where}program {search.profile.program.name!r}",
        why=f"at the peak of {search.describe(mix)}, {name} take {show_bytes(alive[name])}",
        do=f"give at least {show_bytes(smallest)}, more ranks, or fewer rows a rank",
    )
    error.smallest = smallest
    return error
