"""The optimisation behind ``auto``, free of tensors: blocks choose an option, links between them cost.

A block is something to decide (a group of operations, where a parameter is stored); each of its options
has a cost. A link is a value: its producer's option says how it is placed, each reader's option how it is
wanted, and a matrix what every change costs. A change is paid once however many readers want it.

As an integer program: one variable per option, and for each link the flow from made placements to wanted
ones, reader by reader; what flows along a change must have been paid. Given whole options the flows are
whole by themselves. HiGHS (Huangfu and Hall, 2018) solves the relaxation, rounds it, and closes the gap by
cuts and branches as far as the time allows; the bound that it proves is the certificate.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from stepgraph.placement.sparse import SparseProgram

FORWARD, BACKWARD = 0, 1


@dataclass(eq=False)
class Block:
    """One decision: ``cost[o]`` and ``memory[o]`` of each option (seconds and bytes, all copies together).

    ``later``: for work of the backward, the part of it that is done after each of the moments at which
    one looks back at what is still to be reduced.
    """

    name: str
    cost: np.ndarray
    memory: np.ndarray | None = None
    later: np.ndarray | None = None


@dataclass(eq=False)
class Reader:
    """A block that reads a link's value: ``wants[o]`` is the index of the placement it wants it in."""

    block: Block
    wants: np.ndarray
    phase: int = FORWARD


@dataclass(eq=False)
class Link:
    """One value: ``makes[o]`` is the placement in which the producer's option ``o`` makes it.

    ``once[p, q]`` is what changing ``p`` into ``q`` costs; ``again[p, q]`` is paid in each phase that wants
    it. ``later``: the change may run beside work that comes after it; the part of it that begins after
    each of those moments. ``kept[q]``: bytes that a sum, once it is added up into ``q``, takes until the
    backward.
    """

    name: str
    producer: Block
    makes: np.ndarray
    readers: list[Reader]
    once: np.ndarray
    again: np.ndarray
    later: np.ndarray | None = None
    kept: np.ndarray | None = None

    def cost_of(self, made: int, forward: Collection[int], backward: Collection[int]) -> float:
        """Of changing into these placements."""
        total = 0.0
        for q in {*forward, *backward} - {made}:
            total += self.once[made, q] + self.again[made, q] * ((q in forward) + (q in backward))
        return float(total)


@dataclass
class Problem:
    """Everything to decide. ``memory_limit``: bytes that the blocks' options may take together."""

    blocks: list[Block]
    links: list[Link]
    memory_limit: float | None = None

    def cost(self, chosen: Sequence[int]) -> float:
        """Of one option per block, in order of the blocks."""
        option = dict(zip(self.blocks, chosen, strict=True))
        total = sum(float(block.cost[o]) for block, o in option.items())
        beside = np.zeros(1)
        for link in self.links:
            cost = link.cost_of(*_used(link, option))
            if link.later is None:
                total += cost
            else:
                beside = beside + link.later * cost
        for block, o in option.items():
            if block.later is not None:
                beside = beside - block.later * float(block.cost[o])
        return total + max(0.0, float(beside.max()))

    def memory(self, chosen: Sequence[int]) -> float:
        """Bytes of one option per block."""
        option = dict(zip(self.blocks, chosen, strict=True))
        total = sum(float(b.memory[o]) for b, o in option.items() if b.memory is not None)
        for link in self.links:
            if link.kept is not None:
                made, forward, backward = _used(link, option)
                added_up = [q for q in {*forward, *backward} - {made} if link.once[made, q]]
                total += sum(float(link.kept[q]) for q in added_up)
        return total


@dataclass
class Solution:
    """One option per block, its cost, and a bound that no choice can beat (both in seconds)."""

    chosen: list[int]
    cost: float
    bound: float
    variables: int

    @property
    def gap(self) -> float:
        """Part of the cost that is not certified; 0.0: optimal."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


class InfeasibleError(Exception):
    """No choice of options fits the memory limit; ``least`` bytes would, infinite where nothing does."""

    def __init__(self, least: float) -> None:
        super().__init__(f"{least} bytes are needed at least")
        self.least = least


def _used(link: Link, option: dict[Block, int]) -> tuple[int, set[int], set[int]]:
    wanted: tuple[set[int], set[int]] = (set(), set())
    for reader in link.readers:
        wanted[reader.phase].add(int(reader.wants[option[reader.block]]))
    return int(link.makes[option[link.producer]]), *wanted


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
        if problem.memory_limit is not None:
            self.limit = program.row(-infinity, min(1.0, problem.memory_limit))
            self._weigh(self.limit, 1.0 / max(1.0, problem.memory_limit))
        # The step is longer by what no later work hides, seen from whatever moment.
        moments = max((len(x.later) for x in problem.links if x.later is not None), default=0)
        self.beside = [program.row(0.0, infinity) for _ in range(moments)]
        longer = program.column(1.0, infinity)
        for moment, row in enumerate(self.beside):
            program.put(row, longer, 1.0)
            for block in problem.blocks:
                if block.later is not None and block.later[moment]:
                    for option, cost in enumerate(block.cost):
                        value = float(cost) * float(block.later[moment]) * self.scale
                        program.put(row, self.first[block] + option, value)
        for link in problem.links:
            if len(link.readers) == 1:
                self._flow(link, link.readers[0], None)
                continue
            paid: dict[tuple, int] = {}
            for reader in link.readers:
                self._flow(link, reader, paid)

    def _weigh(self, row: int, factor: float) -> None:
        for block in self.problem.blocks:
            if block.memory is not None:
                for option in np.flatnonzero(block.memory):
                    column = self.first[block] + int(option)
                    self.program.put(row, column, float(block.memory[option]) * factor)

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
        for p, made_row in made.items():
            for q, wanted_row in wanted.items():
                cost = link.cost_of(p, *_alone(q, reader.phase))
                if not np.isfinite(cost):
                    continue
                shared = paid is not None and cost > 0
                column = program.column(0.0)
                program.put(made_row, column, 1.0)
                program.put(wanted_row, column, 1.0)
                payer = column
                if shared:
                    key = (p, q, reader.phase if link.again[p, q] else None)
                    if key not in paid:
                        paid[key] = program.column(0.0)
                        self._charge(link, paid[key], cost, p, q)
                    payer = paid[key]
                    covered = program.row(0.0, highspy.kHighsInf)
                    program.put(covered, payer, 1.0)
                    program.put(covered, column, -1.0)
                else:
                    self._charge(link, payer, cost, p, q)

    def _charge(self, link: Link, column: int, cost: float, p: int, q: int) -> None:
        if self.limit is not None and link.kept is not None and link.once[p, q]:
            share = float(link.kept[q]) / max(1.0, float(self.problem.memory_limit or 0))
            self.program.put(self.limit, column, share)
        if link.later is None:
            self.program.costs[column] = cost * self.scale
        elif cost:
            for row, part in zip(self.beside, link.later, strict=True):
                self.program.put(row, column, -cost * float(part) * self.scale)

    def run(self) -> Solution:
        highs = highspy.Highs()
        highs.silent()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        highs.setOptionValue("mip_rel_gap", self.goal)
        highs.setOptionValue("time_limit", max(1.0, self.deadline - time.monotonic()))
        self.program.pass_to(highs, self.options)
        highs.run()
        values = np.asarray(highs.getSolution().col_value)
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible or not len(values):
            raise InfeasibleError(self._least_memory())
        bound = highs.getInfo().mip_dual_bound / self.scale
        chosen = [
            int(np.argmax(values[self.first[b] : self.first[b] + len(b.cost)]))
            for b in self.problem.blocks
        ]
        cost = self.problem.cost(chosen)
        better, its_cost = _descend(self.problem, chosen)
        if its_cost < cost:
            chosen, cost = better, its_cost
        return Solution(chosen, cost, min(bound, cost), len(self.program.costs))

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
        b: Block(b.name, zero[b] if b.memory is None else b.memory) for b in problem.blocks
    }
    links = []
    for link in problem.links:
        kept = np.where(link.once != 0, 0.0 if link.kept is None else link.kept, 0.0)
        once = np.where(np.isinf(link.once), np.inf, kept)
        readers = [Reader(stands_for[r.block], r.wants, r.phase) for r in link.readers]
        free = np.zeros_like(once)
        links.append(Link(link.name, stands_for[link.producer], link.makes, readers, once, free))
    return Problem(list(stands_for.values()), links)


def _alone(q: int, phase: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((q,), ()) if phase == FORWARD else ((), (q,))


def runners_up(problem: Problem, chosen: Sequence[int]) -> list[tuple[float, int | None, float]]:
    """Per block what its option costs with all that touches it, the next best option, and what that costs.

    The others' choices stay as they are.
    """
    option = dict(zip(problem.blocks, chosen, strict=True))
    touching = _touching(problem)
    found: list[tuple[float, int | None, float]] = []
    for block in problem.blocks:
        cost = _of_options(block, touching[block], option)
        own = float(cost[option[block]])
        cost[option[block]] = np.inf
        best = int(np.argmin(cost))
        other = best if np.isfinite(cost[best]) else None
        found.append((own, other, float(cost[best])))
    return found


def _touching(problem: Problem) -> dict[Block, list[Link]]:
    touching: dict[Block, list[Link]] = {block: [] for block in problem.blocks}
    for link in problem.links:
        for block in {link.producer, *(reader.block for reader in link.readers)}:
            touching[block].append(link)
    return touching


def _descend(problem: Problem, chosen: list[int]) -> tuple[list[int], float]:
    """Moves one block at a time to the option that is best among the others' choices."""
    option = dict(zip(problem.blocks, chosen, strict=True))
    touching = _touching(problem)
    limit = problem.memory_limit
    for _ in range(20):
        moved = False
        for block in problem.blocks:
            if len(block.cost) == 1:
                continue
            cost = _of_options(block, touching[block], option)
            best = int(np.argmin(cost))
            if cost[best] < cost[option[block]] - 1e-15 or not np.isfinite(cost[option[block]]):
                option[block], moved = best, True
        if not moved:
            break
    result = [option[block] for block in problem.blocks]
    if limit is not None and problem.memory(result) > limit * (1 + 1e-9):
        return result, np.inf
    return result, problem.cost(result)


def _of_options(block: Block, links: Sequence[Link], option: dict[Block, int]) -> np.ndarray:
    """What each option of a block costs with all that touches it, the others as they are."""
    cost = block.cost.astype(float)
    for link in links:
        cost = cost + _around(link, block, option)
    return cost


def _around(link: Link, block: Block, option: dict[Block, int]) -> np.ndarray:
    """What a link costs for each option of one of its blocks, the others as they are."""
    costs = np.empty(len(block.cost))
    known: dict[tuple, float] = {}
    for o in range(len(block.cost)):
        made = int(link.makes[o if link.producer is block else option[link.producer]])
        wanted: tuple[list[int], list[int]] = ([], [])
        for reader in link.readers:
            q = int(reader.wants[o if reader.block is block else option[reader.block]])
            wanted[reader.phase].append(q)
        key = (made, *map(tuple, wanted))
        if key not in known:
            known[key] = link.cost_of(made, *wanted)
        costs[o] = known[key]
    return costs
