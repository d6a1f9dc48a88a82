"""The optimisation behind ``auto`` as an integer program.

One variable per option, and for each link the flow from made placements to wanted ones, reader by reader;
what flows along a change must have been paid. Given whole options the flows are whole by themselves. HiGHS
(Huangfu and Hall, 2018) solves the relaxation, rounds it, and closes the gap by cuts and branches as far as
the time allows; the bound that it proves is the certificate.
"""

from __future__ import annotations

import time
from dataclasses import replace

import highspy
import numpy as np

from stepgraph.placement.choices import (
    BACKWARD,
    FORWARD,
    Block,
    Link,
    Phases,
    Problem,
    Reader,
    Solution,
    descend,
)
from stepgraph.placement.sparse import SparseProgram

_ENOUGH, _MORE = 0.005, 5.0  # a gap for which one looks no longer than so many seconds more
_NOTABLE = 1e-3  # part of the memory limit: what a block takes less while it runs is not looked at


class InfeasibleError(Exception):
    """No choice of options fits the memory limit; ``least`` bytes would, infinite where nothing does."""

    def __init__(self, least: float) -> None:
        super().__init__(f"{least} bytes are needed at least")
        self.least = least


def solve(problem: Problem, seconds: float = 60.0, goal: float = 1e-3) -> Solution:
    """Finds a cheap choice and a bound.

    Args:
        seconds: time after which the best found so far is returned.
        goal: gap at which it is good enough.

    Raises:
        InfeasibleError: nothing fits the memory limit.
    """
    return _Solver(problem, seconds, goal).run()


class _Solver:
    def __init__(self, problem: Problem, seconds: float, goal: float) -> None:
        self.problem, self.goal = problem, goal
        self.deadline = time.monotonic() + seconds
        self.scale = 1.0 / max(1e-12, sum(float(b.cost.min()) for b in problem.blocks) or 1.0)
        self.program = SparseProgram()
        self.limit: int | None = None
        self.most: int | None = None  # column: what the largest step takes while it runs
        self.unit = max(1.0, problem.memory_limit or problem.most_running())  # bytes
        self.first: dict[Block, int] = {}
        self._build()

    def _build(self) -> None:
        problem, program = self.problem, self.program
        for block in problem.blocks:
            self.first[block] = len(program.costs)
            one = program.row(1.0, 1.0)
            for cost in block.cost:
                program.put(one, program.column(float(cost) * self.scale), 1.0)
        self.options = len(program.costs)
        infinity = highspy.kHighsInf
        if problem.memory_limit is not None or problem.running_cost:
            self._count_what_runs()
        if problem.memory_limit is not None:
            self._limit_memory(problem.memory_limit)
        # The step is longer by what no later work hides, seen from whatever moment.
        moments = max((len(x.later) for x in problem.links if x.later is not None), default=0)
        self.beside = [program.row(0.0, infinity) for _ in range(moments)]
        longer = program.column(1.0, infinity)
        for row in self.beside:
            program.put(row, longer, 1.0)
        for block in problem.blocks:
            if block.later is not None and moments:
                for option, cost in enumerate(block.cost):
                    self._lengthen(self.first[block] + option, -float(cost) * block.later)
        for link in problem.links:
            if len(link.readers) == 1:
                self._flow(link, link.readers[0], None)
                continue
            paid: dict[tuple, int] = {}
            for reader in link.readers:
                self._flow(link, reader, paid)

    def _count_what_runs(self) -> None:
        """A column that is no less than what any block takes while it runs; links add theirs."""
        program = self.program
        price = self.problem.running_cost * self.unit * self.scale
        self.most = program.column(price, highspy.kHighsInf)
        for block in self.problem.blocks:
            if block.temporary is None or block.temporary.max(initial=0.0) < _NOTABLE * self.unit:
                continue
            row = program.row(0.0, highspy.kHighsInf)
            program.put(row, self.most, 1.0)
            for option in np.flatnonzero(block.temporary):
                column = self.first[block] + int(option)
                program.put(row, column, -float(block.temporary[option]) / self.unit)

    def _limit_memory(self, limit: float) -> None:
        assert self.most is not None
        self.limit = self.program.row(-highspy.kHighsInf, min(1.0, limit))
        self.program.put(self.limit, self.most, 1.0)
        for block in self.problem.blocks:
            if block.memory is not None:
                for option in np.flatnonzero(block.memory):
                    column = self.first[block] + int(option)
                    self.program.put(self.limit, column, float(block.memory[option]) / self.unit)

    def _flow(self, link: Link, reader: Reader, paid: dict[tuple, int] | None) -> None:
        """What one reader takes: from each made placement into each wanted one."""
        program = self.program
        made: dict[int, int] = {}
        wanted: dict[int, int] = {}
        for rows, indices, block in (
            (made, link.makes, link.producer), (wanted, reader.wants, reader.block)
        ):  # fmt: skip
            for option, index in enumerate(indices):
                if int(index) not in rows:
                    rows[int(index)] = program.row(0.0, 0.0)
                program.put(rows[int(index)], self.first[block] + option, -1.0)
        runs: int | None = None
        for p, made_row in made.items():
            for q, wanted_row in wanted.items():
                cost = link.cost_of(p, *_alone(q, reader.phases))
                if not np.isfinite(cost):
                    continue
                column = program.column(0.0)
                program.put(made_row, column, 1.0)
                program.put(wanted_row, column, 1.0)
                if self.most is not None and link.temporary is not None:
                    running = float(link.temporary[p, q]) / self.unit
                    if running > _NOTABLE:
                        if runs is None:
                            runs = program.row(0.0, highspy.kHighsInf)
                            program.put(runs, self.most, 1.0)
                        program.put(runs, column, -running)
                once, again = float(link.once[p, q]), float(link.again[p, q])
                if paid is None or not cost:
                    self._charge(link, (p, q), column, cost, once=True)
                    continue
                parts = [(None, once), *((phase, again) for phase in reader.phases)]
                for phase, part in parts:
                    if not part:
                        continue
                    key = (p, q, phase)
                    if key not in paid:
                        paid[key] = program.column(0.0)
                        self._charge(link, (p, q), paid[key], part, once=phase is None)
                    covered = program.row(0.0, highspy.kHighsInf)
                    program.put(covered, paid[key], 1.0)
                    program.put(covered, column, -1.0)

    def _charge(
        self, link: Link, change: tuple[int, int], column: int, cost: float, once: bool
    ) -> None:
        if not once:
            self.program.costs[column] = cost * self.scale
            return
        kept = float(link.kept[change]) if link.kept is not None else 0.0
        if self.limit is not None and kept:
            self.program.put(self.limit, column, kept / self.unit)
        runs, longer = link.beside(change[0], (change[1],))
        self.program.costs[column] = (cost - runs) * self.scale
        if link.later is not None:
            self._lengthen(column, longer)

    def _lengthen(self, column: int, seconds: np.ndarray) -> None:
        """A column adds to what is left to do beside other work after each moment."""
        for row, part in zip(self.beside, seconds, strict=True):
            if part:
                self.program.put(row, column, -float(part) * self.scale)

    def run(self) -> Solution:
        """The relaxation, rounded; where its bound does not certify that, branches and cuts.

        Not for long where it is nearly certified.
        """
        found = self._relaxed()
        if found is not None and found.gap <= self.goal:
            return found
        if found is not None and found.gap <= _ENOUGH:
            self.deadline = min(self.deadline, time.monotonic() + _MORE)
        return self._branched(found)

    def _relaxed(self) -> Solution | None:
        """None: the relaxation was not solved in time, or what it rounds to does not fit."""
        highs = self._highs()
        highs.setOptionValue("solve_relaxation", True)
        highs.run()
        self._is_feasible(highs)
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        chosen, cost = descend(self.problem, self._rounded(highs))
        if not np.isfinite(cost):
            return None
        bound = highs.getInfo().objective_function_value / self.scale
        return Solution(chosen, cost, min(bound, cost), len(self.program.costs))

    def _branched(self, start: Solution | None) -> Solution:
        highs = self._highs()
        highs.setOptionValue("mip_rel_gap", self.goal)
        if start is not None:
            columns = np.arange(self.options, dtype=np.int32)
            values = np.zeros(self.options)
            for block, option in zip(self.problem.blocks, start.chosen, strict=True):
                values[self.first[block] + option] = 1.0
            highs.setSolution(self.options, columns, values)
        highs.run()
        self._is_feasible(highs)
        info = highs.getInfo()
        bound = info.mip_dual_bound / self.scale
        found: list[tuple[float, list[int]]] = []
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            chosen = self._rounded(highs)
            better, its_cost = descend(self.problem, chosen)
            found += [(self.problem.cost(chosen), chosen), (its_cost, better)]
        if start is not None:
            found.append((start.cost, start.chosen))
            bound = max(bound, start.bound)
        if not found:
            raise InfeasibleError(1.1 * (self.problem.memory_limit or 0))  # none found in time
        cost, chosen = min(found, key=lambda pair: pair[0])
        return Solution(chosen, cost, min(bound, cost), len(self.program.costs))

    def _highs(self) -> highspy.Highs:
        highs = highspy.Highs()
        highs.silent()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        highs.setOptionValue("time_limit", max(1.0, self.deadline - time.monotonic()))
        self.program.pass_to(highs, self.options)
        return highs

    def _is_feasible(self, highs: highspy.Highs) -> None:
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            raise InfeasibleError(self._least_memory())

    def _rounded(self, highs: highspy.Highs) -> list[int]:
        values = np.asarray(highs.getSolution().col_value)
        return [
            int(np.argmax(values[self.first[b] : self.first[b] + len(b.cost)]))
            for b in self.problem.blocks
        ]

    def _least_memory(self) -> float:
        """The smallest number of bytes that any choice takes; infinite: there is no choice."""
        if self.problem.memory_limit is None:
            return np.inf
        left = max(1.0, self.deadline - time.monotonic())
        return solve(_of_memory(self.problem), left, 1e-6).cost


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


def _alone(q: int, phases: Phases) -> tuple[tuple[int, ...], ...]:
    """The placements wanted in the forward and in the backward, if it is this one alone."""
    return tuple((q,) if phase in phases else () for phase in (FORWARD, BACKWARD))
