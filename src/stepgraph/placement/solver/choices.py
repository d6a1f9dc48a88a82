"""What ``auto`` chooses among, free of tensors: blocks choose an option, links between them cost.

A block is something to decide (a group of operations, where a parameter is stored); each of its options
has a cost. A link is a value: its producer's option says how it is placed, each reader's option how it is
wanted, and a matrix what every change costs. A change is paid once however many readers want it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice

import numpy as np

FORWARD, BACKWARD = 0, 1
_EXCHANGES = 5000  # between two blocks, times links: what is looked at
# Those that one of them wants something in; what is recomputed does in both.
Phases = tuple[int, ...]


@dataclass(eq=False)
class Block:
    """One decision: ``cost[o]`` and ``memory[o]`` of each option (seconds and bytes, all copies together).

    ``later``: for work of the backward, the part of it that is done after each of the moments at which
    one looks back at what is still to be reduced. ``temporary[o]``: bytes that it takes only while it runs,
    beside all memory.
    """

    name: str
    cost: np.ndarray
    memory: np.ndarray | None = None
    later: np.ndarray | None = None
    temporary: np.ndarray | None = None


@dataclass(eq=False)
class Reader:
    """A block that reads a link's value: ``wants[o]`` is the index of the placement it wants it in."""

    block: Block
    wants: np.ndarray
    phases: Phases = (FORWARD,)


@dataclass(eq=False)
class Link:
    """One value: ``makes[o]`` is the placement in which the producer's option ``o`` makes it.

    ``once[p, q]`` is what changing ``p`` into ``q`` costs, ``again[p, q]`` what it costs besides in each
    phase that wants it. ``kept[p, q]``: bytes that what is not made again takes until the backward;
    ``temporary[p, q]``: those that a change takes while it runs.

    ``later``, of a value of the backward, and with it the two below: the part of the changes that begins
    after each of those moments.
    ``runs[p, q]``: the part of the cost that runs beside the work that comes after it; ``hides[p, q]``: the
    part for which that work waits, but not what runs beside it, over other wires.
    """

    name: str
    producer: Block
    makes: np.ndarray
    readers: list[Reader]
    once: np.ndarray
    again: np.ndarray
    later: np.ndarray | None = None
    kept: np.ndarray | None = None
    temporary: np.ndarray | None = None
    runs: np.ndarray | None = None
    hides: np.ndarray | None = None

    def beside(self, made: int, wanted: Collection[int]) -> tuple[float, np.ndarray | float]:
        """What runs beside other work, and how much more is left of that after each moment."""
        if self.later is None:
            return 0.0, 0.0
        assert self.runs is not None and self.hides is not None
        runs = hides = 0.0
        for other in sorted({*wanted} - {made}):
            runs, hides = runs + self.runs[made, other], hides + self.hides[made, other]
        return runs, (runs - hides) * self.later

    def cost_of(self, made: int, forward: Collection[int], backward: Collection[int]) -> float:
        """Of changing into these placements."""
        total = 0.0
        for q in {*forward, *backward} - {made}:
            total += self.once[made, q] + self.again[made, q] * ((q in forward) + (q in backward))
        return float(total)


@dataclass
class Problem:
    """Everything to decide. ``memory_limit``: bytes of all options, and of the largest that only runs.

    ``running_cost``: what a byte of that one costs.
    """

    blocks: list[Block]
    links: list[Link]
    memory_limit: float | None = None
    running_cost: float = 0.0

    def cost(self, chosen: Sequence[int]) -> float:
        """Of one option per block, in order of the blocks."""
        option = dict(zip(self.blocks, chosen, strict=True))
        total = sum(float(block.cost[o]) for block, o in option.items())
        beside: np.ndarray | float = np.zeros(1)
        for link in self.links:
            made, forward, backward = used_of(link, option)
            runs, longer = link.beside(made, forward | backward)
            total += link.cost_of(made, forward, backward) - runs
            beside = beside + longer
        for block, o in option.items():
            if block.later is not None:
                beside = beside - block.later * float(block.cost[o])
        running = self.running(chosen) if self.running_cost else 0.0
        return total + max(0.0, float(beside.max())) + self.running_cost * running

    def most_running(self) -> float:
        """Bytes that no step takes more of, whatever is chosen."""
        tables = [x.temporary for x in (*self.blocks, *self.links) if x.temporary is not None]
        return max((float(table.max(initial=0.0)) for table in tables), default=0.0)

    def running(self, chosen: Sequence[int]) -> float:
        """Bytes that the largest step takes while it runs."""
        option = dict(zip(self.blocks, chosen, strict=True))
        sizes = [float(b.temporary[o]) for b, o in option.items() if b.temporary is not None]
        for link in self.links:
            if link.temporary is not None:
                made, forward, backward = used_of(link, option)
                sizes += [float(link.temporary[made, q]) for q in {*forward, *backward}]
        return max(sizes, default=0.0)

    def memory(self, chosen: Sequence[int]) -> float:
        """Bytes of one option per block."""
        option = dict(zip(self.blocks, chosen, strict=True))
        total = sum(float(b.memory[o]) for b, o in option.items() if b.memory is not None)
        for link in self.links:
            if link.kept is not None:
                made, forward, backward = used_of(link, option)
                total += sum(float(link.kept[made, q]) for q in {*forward, *backward})
        return total + self.running(chosen)

    def fits(self, chosen: Sequence[int]) -> bool:
        """Whether that is within the limit."""
        limit = self.memory_limit
        return limit is None or self.memory(chosen) <= limit * (1 + 1e-9)


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


def used_of(link: Link, option: dict[Block, int]) -> tuple[int, set[int], set[int]]:
    """The placement that a value is made in, those wanted in the forward, those in the backward."""
    wanted: tuple[set[int], set[int]] = (set(), set())
    for reader in link.readers:
        for phase in reader.phases:
            wanted[phase].add(int(reader.wants[option[reader.block]]))
    return int(link.makes[option[link.producer]]), *wanted


def runners_up(problem: Problem, chosen: Sequence[int]) -> list[tuple[float, int | None, float]]:
    """Per block what its option costs with all that touches it, the next best option, and what that costs.

    The others' choices stay as they are; what does not fit the memory limit is no option. Behind
    :func:`improve` no other costs less.
    """
    now = _Chosen(problem, chosen)
    found: list[tuple[float, int | None, float]] = []
    for block in problem.blocks:
        own = now.own(block)
        more = now.more(block)
        more[now.option[block]] = np.inf
        other = next(now.fitting(block, more), None)
        its_cost = np.inf if other is None else own + max(0.0, float(more[other]))
        found.append((own, other, its_cost))
    return found


def improve(problem: Problem, chosen: Sequence[int]) -> list[int]:
    """Moves one block at a time to what fits and makes the whole cheapest, until nothing does.

    Two blocks with the same options exchange theirs as well: alone, neither may have room for the other's.
    """
    now, twins = _Chosen(problem, chosen), _twins(problem)
    least = 1e-9 * max(problem.cost(chosen), 1e-12)
    moved = True
    while moved:
        moved = False
        for block in problem.blocks:
            if len(block.cost) == 1:
                continue
            more = now.more(block)
            best = next(now.fitting(block, np.where(more < -least, more, np.inf)), None)
            if best is not None:
                now, moved = now.moved(block, best), True
        for one, other in () if moved else twins:
            if now.option[one] == now.option[other]:
                continue
            exchanged = now.exchanged(one, other)
            if exchanged.cost < now.cost - least and problem.fits(exchanged.chosen):
                now, moved = exchanged, True
    return now.chosen


def _twins(problem: Problem) -> list[tuple[Block, Block]]:
    """Blocks with the same options where memory is limited: both may want what only one has room for."""
    if problem.memory_limit is None or problem.running_cost:
        return []
    kept = [block for block in problem.blocks if block.memory is not None and len(block.cost) > 1]
    found = (
        (one, other)
        for one, other in combinations(kept, 2)
        if np.array_equal(one.cost, other.cost) and np.array_equal(one.memory, other.memory)
    )
    return [*islice(found, _EXCHANGES // max(1, len(problem.links)))]


class _Chosen:
    """One option per block; says what another option of one of them would change."""

    def __init__(self, problem: Problem, chosen: Sequence[int]) -> None:
        self.problem = problem
        self.option = dict(zip(problem.blocks, chosen, strict=True))
        self._touching = _touching(problem)
        moments = (len(x.later) for x in (*problem.links, *problem.blocks) if x.later is not None)
        self._beside = np.zeros(max(moments, default=1))
        for link in problem.links:
            made, forward, backward = used_of(link, self.option)
            self._beside = self._beside + link.beside(made, forward | backward)[1]
        for block, o in self.option.items():
            if block.later is not None:
                self._beside = self._beside - block.later * float(block.cost[o])

    @property
    def chosen(self) -> list[int]:
        """In order of the blocks."""
        return [self.option[block] for block in self.problem.blocks]

    def own(self, block: Block) -> float:
        """What a block's option costs with all that touches it."""
        found = float(block.cost[self.option[block]])
        for link in self._touching[block]:
            found += link.cost_of(*used_of(link, self.option))
        return found

    def more(self, block: Block) -> np.ndarray:
        """What the whole would cost more under each option of a block, the others as they are."""
        whole = self._whole(block)
        return whole - whole[self.option[block]]

    def _whole(self, block: Block) -> np.ndarray:
        """What of the whole depends on a block, under each of its options."""
        cost = block.cost.astype(float)
        beside = np.zeros((len(cost), len(self._beside)))
        if block.later is not None:
            beside -= cost[:, None] * block.later
        for link in self._touching[block]:
            changed, runs, longer = _around(link, block, self.option)
            cost, beside = cost + (changed - runs), beside + longer
        here = self.option[block]
        rest = self._beside - beside[here]
        return cost + np.maximum((rest + beside).max(axis=1), 0.0)

    def fitting(self, block: Block, more: np.ndarray) -> Iterator[int]:
        """Options whose cost is finite and that fit, the cheapest first."""
        for o in np.argsort(more, kind="stable"):
            if not np.isfinite(more[o]):
                return
            if self.problem.memory_limit is not None:
                option = self.option | {block: int(o)}
                if not self.problem.fits([option[b] for b in self.problem.blocks]):
                    continue
            yield int(o)

    @cached_property
    def cost(self) -> float:
        """Of the whole."""
        return self.problem.cost(self.chosen)

    def exchanged(self, one: Block, other: Block) -> "_Chosen":
        """The same with the options of two blocks exchanged; what touches them follows."""
        options = self.option[one], self.option[other]
        now = self.moved(one, options[1]).moved(other, options[0])
        touching = self._touching
        near = _neighbours(one, touching[one]) | _neighbours(other, touching[other])
        for block in self.problem.blocks:
            if block in near - {one, other}:
                whole = now._whole(block)  # infinite, where it has not followed yet
                if whole.min() < whole[now.option[block]]:
                    now = now.moved(block, int(whole.argmin()))
        return now

    def moved(self, block: Block, option: int) -> "_Chosen":
        """The same with another option for one block."""
        now = self.option | {block: option}
        return _Chosen(self.problem, [now[b] for b in self.problem.blocks])


def _touching(problem: Problem) -> dict[Block, list[Link]]:
    touching: dict[Block, list[Link]] = {block: [] for block in problem.blocks}
    for link in problem.links:
        for block in {link.producer, *(reader.block for reader in link.readers)}:
            touching[block].append(link)
    return touching


def descend(problem: Problem, chosen: list[int]) -> tuple[list[int], float]:
    """Moves one block at a time to the option that is best among the others' choices.

    Those know neither of the memory limit nor of what runs beside other work.

    Returns:
        where it began or where that leads, whichever fits and costs less; infinite: neither fits.
    """
    option = dict(zip(problem.blocks, chosen, strict=True))
    touching = _touching(problem)
    to_do = {block for block in problem.blocks if len(block.cost) > 1}
    for _ in range(20):
        for block in problem.blocks:
            if block not in to_do:
                continue
            to_do.discard(block)
            cost = _of_options(block, touching[block], option)
            best = int(np.argmin(cost))
            if cost[best] < cost[option[block]] - 1e-15 or not np.isfinite(cost[option[block]]):
                option[block] = best
                to_do |= _neighbours(block, touching[block])
        if not to_do:
            break
    reached = [option[block] for block in problem.blocks]
    costs = [problem.cost(x) if problem.fits(x) else np.inf for x in (reached, chosen)]
    return (reached, costs[0]) if costs[0] <= costs[1] else (chosen, costs[1])


def _neighbours(block: Block, links: Sequence[Link]) -> set[Block]:
    """Blocks that something else may be best for, where this one has changed."""
    found = {other for link in links for other in (link.producer, *(r.block for r in link.readers))}
    return {other for other in found if other is not block and len(other.cost) > 1}


def _of_options(block: Block, links: Sequence[Link], option: dict[Block, int]) -> np.ndarray:
    """What each option of a block costs with all that touches it, the others as they are."""
    cost = block.cost.astype(float)
    for link in links:
        cost = cost + _around(link, block, option)[0]
    return cost


def _around(
    link: Link, block: Block, option: dict[Block, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
    """What a link costs for each option of one of its blocks, the others as they are.

    Returns:
        its cost, which part of that runs beside other work, and how much more is left of that after each
        moment: a row an option.
    """
    rows: list[tuple[float, float, np.ndarray | float]] = []
    known: dict[tuple, tuple[float, float, np.ndarray | float]] = {}
    count = len(block.cost)

    def of_each(of: Block, indices: np.ndarray) -> list[int]:
        return indices.tolist() if of is block else [int(indices[option[of]])] * count

    makes = of_each(link.producer, link.makes)
    wants = [(reader.phases, of_each(reader.block, reader.wants)) for reader in link.readers]
    for o in range(count):
        made = makes[o]
        wanted: tuple[list[int], list[int]] = ([], [])
        for phases, indices in wants:
            for phase in phases:
                wanted[phase].append(indices[o])
        key = (made, *map(tuple, wanted))
        if key not in known:
            beside = link.beside(made, {*wanted[0], *wanted[1]})
            known[key] = link.cost_of(made, *wanted), *beside
        rows.append(known[key])
    costs, runs, longer = zip(*rows, strict=True)
    return np.array(costs), np.array(runs), 0.0 if link.later is None else np.array(longer)
