"""Solves the optimisation behind ``auto``: a cheap choice, and a bound that certifies it.

HiGHS (Huangfu and Hall, 2018) solves the relaxation and branches of it, which are rounded; where they leave
much open it searches the whole with cuts, as far as the time allows.
"""

import heapq
import itertools
import time
from dataclasses import replace

import highspy
import numpy as np

from stepgraph.placement.solver.choices import Problem, Reader, Solution, descend, improve
from stepgraph.placement.solver.formulation import Formulation

# Steps of the simplex times columns, for branches of the relaxation: seconds. Where a memory limit binds,
# it divides the relaxation far from any choice: branches soon find nothing better, certified or not.
_CHEAP, _CHEAP_IN_LIMIT = 2_000_000_000, 300_000_000
# Steps of the simplex to a relaxation within a limit. Where more are needed, an interior point is found in
# less time, and that nothing fits is seen in much less.
_STEPS = 15_000
_PATIENCE, _IN_LIMIT = 0.15, 1e-2  # where it binds: part of them after which this gap is the goal
_OVER = 0.1  # a limit that is itself an estimate is exceeded by so much at most
_ALIKE = 2  # limits that differ by more are each formulated in bytes of their own
_WHOLE = 1e-6  # what differs less from 0 or 1 is that
_OPTIMAL = highspy.HighsModelStatus.kOptimal


class InfeasibleError(Exception):
    """No choice of options fits the memory limit; ``least`` bytes would, infinite where nothing does."""

    def __init__(self, least: float) -> None:
        super().__init__(f"{least} bytes are needed at least")
        self.least = least


def solve(
    problem: Problem,
    seconds: float = 60.0,
    goal: float = 1e-3,
    enough: float = 5e-3,
    hasty: bool = False,
) -> Solution:
    """Finds a cheap choice and a bound.

    Args:
        seconds: time after which the best found so far is returned.
        goal: gap that is looked for while that is cheap.
        enough: gap that is looked for as long as there is time.
        hasty: the memory limit is an estimate. A tenth more is taken where that makes a step much shorter,
            and the first choice that is found will do, whatever its gap, where the limit binds.

    Raises:
        InfeasibleError: nothing fits the memory limit.
    """
    return Search(problem, goal, enough).within(problem.memory_limit, seconds, hasty)


class Search:
    """One problem, solved within one memory limit after another: each from where the last one ended.

    Args:
        problem: with a limit, or with none for good.
        goal, enough: of :func:`solve`.
    """

    def __init__(self, problem: Problem, goal: float = 1e-3, enough: float = 5e-3) -> None:
        self.problem, self.goal, self.enough = problem, goal, enough
        formulation = Formulation(problem)
        self.program, self.options = formulation.program, formulation.options
        self.blocks, self.scale = formulation.blocks, formulation.scale
        self.limit, self.over, self.unit = formulation.limit, formulation.over, formulation.unit
        self.hasty = self.binds = False
        self.says_least, self.deadline = True, np.inf
        self._relaxed: highspy.Highs | None = None
        self._basis: highspy.HighsBasis | None = None  # of the last relaxation that was solved
        self._fixed: dict[int, float] = {}  # columns of the branch that was looked at last

    def begins_near(self, limit: float | None) -> bool:
        """Whether a solution is known to begin with, and a limit is like the first, whose unit it is in."""
        alike = limit is None or 1 / _ALIKE <= limit / self.unit <= _ALIKE
        return self._basis is not None and alike

    def within(
        self, limit: float | None, seconds: float, hasty: bool = False, says_least: bool = True
    ) -> Solution:
        """The relaxation and its branches, rounded; where that certifies too little, HiGHS' cuts too.

        No other option of one block would make the best that is found cheaper.

        Args:
            limit: bytes, in place of the problem's.
            seconds, hasty: of :func:`solve`.
            says_least: an :class:`InfeasibleError` says how many bytes would do, and not only that the
                limit does not, which takes less time.

        Raises:
            InfeasibleError: nothing fits.
        """
        self.deadline, self.hasty = time.monotonic() + seconds, hasty and limit is not None
        self.says_least, self.binds = says_least, False
        if limit is not None:
            self._limit_to(limit)
        found = self.branched()
        if found is None or (found.gap > self.enough and not self.binds):
            found = self._cut(found)
        if self.problem.running_cost:
            return found
        chosen = improve(self.problem, found.chosen)
        return replace(found, chosen=chosen, cost=self.problem.cost(chosen))

    def branched(self, at_all: bool = True) -> Solution | None:
        """Branches on what the relaxation divides, the lowest bound first.

        Little is divided: identical layers decide together. So it takes a few branches, each some steps of
        the simplex from where another ended; HiGHS' own search prepares for more, which takes longer.

        Args:
            at_all: False: the relaxation alone.

        Returns:
            the best found; None: nothing was in time.
        """
        highs, limit = self._relaxation(), self.problem.memory_limit
        _relax(highs, _STEPS if limit is not None else highspy.kHighsIInf)
        self._is_feasible(highs)
        if highs.getModelStatus() != _OPTIMAL:
            return None
        if self.hasty and limit is not None:
            self._raise(highs, limit)
        self._basis = highs.getBasis()
        values = np.asarray(highs.getSolution().col_value)
        self.binds = limit is not None and self._reaches_limit(highs)
        left = (_CHEAP_IN_LIMIT if self.binds else _CHEAP) // len(self.program.costs) * at_all
        hasty = (1 - _PATIENCE) * left if self.binds else -np.inf
        best, chosen = self._rounded(values)
        numbers = itertools.count()  # no two branches are alike
        none: dict[int, float] = {}
        waiting = [(_objective(highs), next(numbers), none, values, self._basis)]
        closed = np.inf  # the lowest bound of what is not looked at further
        while waiting:
            bound, _, below, values, basis = waiting[0]
            if self.hasty and self.binds and np.isfinite(best):
                break
            if min(bound, closed) >= self._bound_of(best, left <= hasty):
                break
            heapq.heappop(waiting)
            column = self._divided(values)
            if column is None:
                closed = min(closed, bound)
                continue
            for value in (1.0, 0.0):
                enough = self._bound_of(best, left <= hasty)
                fixed = below | {column: value}
                self._fix(highs, fixed)
                highs.setBasis(basis)  # from where the branch begins, not from where another ended
                highs.setOptionValue("objective_bound", enough)
                highs.setOptionValue("simplex_iteration_limit", max(0, left))
                highs.run()
                left -= highs.getInfo().simplex_iteration_count
                status = highs.getModelStatus()
                if status == _OPTIMAL:
                    values = np.asarray(highs.getSolution().col_value)
                    best, chosen = min((best, chosen), self._rounded(values))
                    found = _objective(highs), next(numbers), fixed, values, highs.getBasis()
                    heapq.heappush(waiting, found)
                elif status == highspy.HighsModelStatus.kObjectiveBound:
                    closed = min(closed, enough)
                elif status != highspy.HighsModelStatus.kInfeasible:  # out of steps
                    closed = min(closed, bound)
        if not np.isfinite(best):
            return None
        bound = min(closed, *(bound for bound, *_ in waiting), best * self.scale) / self.scale
        return Solution(chosen, best, bound, len(self.program.costs))

    def _relaxation(self) -> highspy.Highs:
        """Without any branch, at the last basis; where the limit is an estimate, with more at a price.

        The price keeps that of memory low while the simplex looks for it, which takes fewer steps.
        """
        if self._relaxed is None:
            self._relaxed = self._highs()
            self._relaxed.setOptionValue("solve_relaxation", True)
            # A busy machine must not decide otherwise.
            self._relaxed.setOptionValue("time_limit", np.inf)
        highs = self._relaxed
        highs.setOptionValue("objective_bound", highspy.kHighsInf)
        self._fix(highs, {})
        if self.limit is not None:
            highs.changeRowBounds(self.limit, -highspy.kHighsInf, self.program.upper[self.limit])
            most = _OVER * self.program.upper[self.limit] if self.hasty else 0.0
            highs.changeColBounds(self.over, 0.0, most)
        if self._basis is None:
            highs.clearSolver()
        else:
            highs.setBasis(self._basis)
        return highs

    def _limit_to(self, limit: float) -> None:
        self.problem = replace(self.problem, memory_limit=limit)
        self.program.upper[self.limit] = limit / self.unit

    def _raise(self, highs: highspy.Highs, limit: float) -> None:
        """Raises the limit by what was taken beyond it; from now on it holds."""
        self._limit_to(limit + self.unit * highs.getSolution().col_value[self.over])
        highs.changeRowBounds(self.limit, -highspy.kHighsInf, self.program.upper[self.limit])
        highs.changeColBounds(self.over, 0.0, 0.0)
        highs.run()

    def _fix(self, highs: highspy.Highs, fixed: dict[int, float]) -> None:
        """Columns have these values, and those that had any are free."""
        for column in self._fixed:
            highs.changeColBounds(column, 0.0, 1.0)
        for column, value in fixed.items():
            highs.changeColBounds(column, value, value)
        self._fixed = fixed

    def _bound_of(self, best: float, is_hasty: bool) -> float:
        """The lowest objective that still certifies the gap that is the goal."""
        goal = max(self.goal, _IN_LIMIT) if is_hasty else self.goal
        return best * self.scale * (1 - goal)

    def _divided(self, values: np.ndarray) -> int | None:
        """Of the block that is divided most evenly the column that is taken most of."""
        first, size = min(self.blocks, key=lambda block: values[block[0] : sum(block)].max())
        column = first + int(values[first : first + size].argmax())
        return column if values[column] < 1 - _WHOLE else None

    def _rounded(self, values: np.ndarray) -> tuple[float, list[int]]:
        """The best of the roundings, and what it costs."""
        found = [descend(self.problem, start) for start in self._roundings(values)]
        return min((cost, chosen) for chosen, cost in found)

    def _roundings(self, values: np.ndarray) -> list[list[int]]:
        """What is taken most of; of what is taken at all, that which keeps least."""
        most = [int(values[first : first + size].argmax()) for first, size in self.blocks]
        if self.problem.memory_limit is None:
            return [most]
        least = list(most)
        pairs = zip(self.problem.blocks, self.blocks, strict=True)
        for number, (block, (first, size)) in enumerate(pairs):
            taken = np.flatnonzero(values[first : first + size] > _WHOLE)
            if block.memory is not None:
                least[number] = int(taken[block.memory[taken].argmin()])
        return [most, least] if least != most else [most]

    def _cut(self, start: Solution | None) -> Solution:
        """HiGHS' own search, from the best that is known."""
        highs = self._highs()
        highs.setOptionValue("mip_rel_gap", self.enough)
        if start is not None:
            columns = np.arange(self.options, dtype=np.int32)
            values = np.zeros(self.options)
            for (first, _), option in zip(self.blocks, start.chosen, strict=True):
                values[first + option] = 1.0
            highs.setSolution(self.options, columns, values)
        highs.run()
        self._is_feasible(highs)
        info = highs.getInfo()
        bound = info.mip_dual_bound / self.scale
        cost, chosen = np.inf, []
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            cost, chosen = self._rounded(np.asarray(highs.getSolution().col_value))
        if start is not None:
            cost, chosen = min((cost, chosen), (start.cost, start.chosen))
            bound = max(bound, start.bound)
        if not np.isfinite(cost):
            raise InfeasibleError(1.1 * (self.problem.memory_limit or 0))  # none found in time
        return Solution(chosen, cost, min(bound, cost), len(self.program.costs))

    def _highs(self) -> highspy.Highs:
        highs = highspy.Highs()
        highs.silent()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        highs.setOptionValue("time_limit", max(1.0, self.deadline - time.monotonic()))
        self.program.pass_to(highs, self.options)
        return highs

    def _reaches_limit(self, highs: highspy.Highs) -> bool:
        """Whether the memory limit costs anything: the relaxation takes all of it."""
        taken = highs.getSolution().row_value[self.limit]
        return taken >= self.program.upper[self.limit] * (1 - 1e-3)

    def _is_feasible(self, highs: highspy.Highs) -> None:
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            limit = self.problem.memory_limit
            if limit is not None and self.says_least:
                limit = self._least_memory()
            raise InfeasibleError(np.inf if limit is None else limit)

    def _least_memory(self) -> float:
        """Bytes of a choice that takes few."""
        search = Search(_of_memory(self.problem), 1e-2, 1e-2)
        found = search.branched(at_all=False)
        return (found or search.within(None, max(1.0, self.deadline - time.monotonic()))).cost


def _relax(highs: highspy.Highs, steps: int) -> None:
    """Solves a relaxation: by the simplex in so many steps, else from an interior point."""
    highs.setOptionValue("simplex_iteration_limit", steps)
    highs.run()
    highs.setOptionValue("simplex_iteration_limit", highspy.kHighsIInf)
    for solver in ("ipm", "simplex"):
        if highs.getModelStatus() in (_OPTIMAL, highspy.HighsModelStatus.kInfeasible):
            break
        highs.setOptionValue("solver", solver)
        highs.run()
    highs.setOptionValue("solver", "choose")


def _of_memory(problem: Problem) -> Problem:
    """The problem whose costs are another's bytes."""
    zero = {block: np.zeros(len(block.cost)) for block in problem.blocks}
    stands_for = {
        b: replace(b, cost=zero[b] if b.memory is None else b.memory, memory=None, later=None)
        for b in problem.blocks
    }
    links = []
    for link in problem.links:
        kept = np.zeros_like(link.once) if link.kept is None else link.kept
        once = np.where(np.isinf(link.once), np.inf, kept)
        readers = [Reader(stands_for[r.block], r.wants, r.phases) for r in link.readers]
        producer, free = stands_for[link.producer], np.zeros_like(once)
        changed = {"readers": readers, "producer": producer, "once": once, "again": free}
        links.append(replace(link, **changed, later=None, runs=None, hides=None, kept=None))
    return Problem(list(stands_for.values()), links, running_cost=1.0)


def _objective(highs: highspy.Highs) -> float:
    return highs.getInfo().objective_function_value
