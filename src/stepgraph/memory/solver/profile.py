"""What a step takes by how much each block keeps: with all blocks alike, and added up where they differ.

A step with all blocks on one level is simulated; where it is deep, two steps of few layers are: what a
layer adds is the same however deep a step is. The peaks of four stretches are noted: the forward, the
backward of the head, that of the blocks, and what is behind it. Where blocks differ, each follows from what
the blocks before it keep. What is found so is simulated before it is taken.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.layers import find_layers
from stepgraph.cost.device import Device
from stepgraph.cost.predict import Trial
from stepgraph.cost.short_steps import APART
from stepgraph.cost.traffic import assign_traffic
from stepgraph.cost.work import operation_seconds
from stepgraph.memory.solver.blocks import Blocks, Level
from stepgraph.memory.solver.levels import POLICIES, Costs, find_levels
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program

MANY = 2500  # operations of a Program of which shorter ones are simulated
_SURELY = 0.8  # part of the seconds of what is computed again that a step takes longer at least

Simulate = Callable[[Program, MemoryDecision], Trial]
"""What a placed Program takes under a decision, scheduled, bound and lowered; it stays as it is."""
Mix = tuple[int, ...]
"""The number of the level of each block."""


@dataclass(frozen=True)
class Estimate:
    """What a step takes: seconds, and bytes at the peak."""

    seconds: float
    peak: float


@dataclass(frozen=True)
class _Alike:
    """A step with all blocks on one level.

    Its seconds; its peaks in the forward, the head's backward, the blocks' backward and behind; bytes of
    gradients then.
    """

    seconds: float
    forward: float
    head: float
    blocks: float
    behind: float
    gradients: float

    @property
    def peak(self) -> float:
        """Of the whole step."""
        return max(self.forward, self.head, self.blocks, self.behind)

    def further(self, other: "_Alike", steps: float) -> "_Alike":
        """So many times the difference to another beyond it."""
        return other.moved(self, other, steps)

    def moved(self, here: "_Alike", there: "_Alike", steps: float = 1.0) -> "_Alike":
        """This, and so many times the difference between two others."""
        rows = zip(*(vars(one).values() for one in (self, here, there)), strict=True)
        return _Alike(*(own + steps * (b - a) for own, a, b in rows))


class Profile:
    """Levels of a placed Program's blocks, and what a step takes by which block is on which.

    Args:
        program: placed; it stays as it is.
        gather_again: parameters that were gathered are gathered again for the backward.
        simulate: what is simulated is what would run.
        device: whose costs count.
        fused: whether operations are fused into kernels.
    """

    def __init__(
        self, program: Program, gather_again: bool, simulate: Simulate, device: Device, fused: bool
    ) -> None:
        self.program, self.simulate = program, simulate
        self.blocks = Blocks(program, gather_again)
        self.count = len(self.blocks.blocks)
        self.known: dict[Mix, Trial] = {}
        self._shorter = shorter = self._short_steps(gather_again)
        self.is_deep = bool(shorter)
        short = shorter[0] if shorter else self.blocks
        many = not shorter and len(program.graph.nodes) > MANY
        seconds, to_host = _seconds_of(short, device, fused), device.host is not None
        found = find_levels(short, seconds, many, to_host)
        self.levels: list[Level] = list(found)
        self._slopes: list[float] = []  # bytes that a layer adds, by level, of a deep step
        if shorter:
            self.alike = self._by_shorter(found, *shorter)
        else:
            every = range(len(self.levels))
            self.alike = [self._stretches(self.trial(self.uniform(n)), self.blocks) for n in every]
        self._set_costs([found[level] for level in self.levels])

    def decision(self, policy: str, mix: Mix) -> MemoryDecision:
        """What is recomputed under a mix."""
        return self.blocks.decision(policy, [self.levels[number] for number in mix])

    def trial(self, mix: Mix) -> Trial:
        """What a step really takes under a mix; simulated once."""
        if mix not in self.known:
            self.known[mix] = self.simulate(self.program, self.decision("", mix))
        return self.known[mix]

    def uniform(self, number: int) -> Mix:
        """All blocks on one level."""
        return (number,) * self.count

    def with_head(self, simulate: Simulate, both: bool) -> "Profile":
        """The same of a deep step whose head is computed otherwise: what blocks cost is what it is.

        What it differs in is seen with one level, and with one that offloads, whose copies it hides.

        Args:
            simulate: with the other head.
            both: short steps are simulated, not only the longer one.
        """
        other = copy.copy(self)
        other.simulate, other.known, other._ends = simulate, {}, {}
        moved: dict[bool, tuple[_Alike, _Alike]] = {}
        for offloads, (level, few, more) in self._ends.items():
            longer = other._of_short(level, self._shorter[1])
            moved[offloads] = more, longer
            if both:
                few = other._of_short(level, self._shorter[0])
                before = self.alike[self.levels.index(level)]
                moved[offloads] = before, few.further(longer, self._steps)
            other._ends[offloads] = level, few, longer
        pairs = zip(self.levels, self.alike, strict=True)
        other.alike = [alike.moved(*moved[level.offloads]) for level, alike in pairs]
        other._longer = [
            longer.moved(self._ends[level.offloads][2], other._ends[level.offloads][2])
            for level, longer in zip(self.levels, self._longer, strict=True)
        ]
        return other

    def estimate(self, mix: Mix) -> Estimate:
        """What a step takes under a mix, by the steps whose blocks are alike."""
        ((seconds, peak),) = self.estimates([mix])
        return Estimate(seconds, peak)

    def estimates(self, mixes: Sequence[Mix]) -> list[tuple[float, float]]:
        """Seconds and peaks of :meth:`estimate`, of many mixes at once."""
        levels, every = np.array(mixes), np.arange(self.count)
        alike = np.array([[*vars(one).values()] for one in self.alike])
        seconds, forward, head, blocks, behind, gradients = alike.T
        more = seconds - seconds[0]
        taken = seconds[0] + (more[levels] * self._shares[levels, every]).sum(1)
        held, of_level = self._bytes[levels, every], self._bytes.sum(1)
        last = levels[:, -1]
        saved = held.sum(1) - of_level[last]
        # The last block of a stretch on one level finds most.
        at = blocks[levels] - of_level[levels] + held.cumsum(1)
        at += (self.count - 1 - every) / self.count * gradients[levels]
        at[:, :-1][levels[:, :-1] == levels[:, 1:]] = -np.inf
        rows = (forward[last] + saved, head[last] + saved, behind[levels[:, 0]], at.max(1))
        taken = taken.round(12)  # the same in whatever order it is added up
        return [*zip(taken.tolist(), np.max(rows, 0).tolist(), strict=True)]

    def kept_bytes(self, level: int) -> float:
        """Bytes that all blocks keep on a level."""
        return float(self._bytes[level].sum())

    def rehearsed(self, first: int, last: int) -> tuple[float, float]:
        """By how many seconds and bytes the estimate is off where blocks of two levels meet.

        That happens once in a mix, however many blocks are on each of them, so a short step shows it.
        """
        blocks = self._shorter[1]
        count = len(blocks.blocks)
        mix = (first,) * (count // 2) + (last,) * (count - count // 2)
        short = copy.copy(self)
        short.count, short.alike, short._bytes = count, self._longer, self._bytes[:, :count]
        short._shares = np.full_like(short._bytes, 1 / count)
        decision = blocks.decision("", [self.levels[number] for number in mix])
        trial, estimate = self.simulate(blocks.program, decision), short.estimate(mix)
        return trial.seconds - estimate.seconds, trial.memory.peak() - estimate.peak

    def _short_steps(self, gather_again: bool) -> list[Blocks]:
        """Two steps of few layers of a deep one; none where it is not, or its blocks are not its layers."""
        nodes = len(self.program.graph.nodes)
        if nodes <= MANY or len(set(self.blocks.kinds)) > 1:
            return []
        layers = find_layers(self.program)
        if layers is None or layers.most < 2 * APART or layers.forward != self.blocks.blocks:
            return []
        names = self.blocks.names
        self._behind = {meta(node)["name"] for layer in layers.backward for node in layer}
        counts = (layers.most, layers.most - APART)
        return [Blocks(layers.without(count), gather_again, names) for count in counts]

    def _by_shorter(self, found: Mapping[Level, Costs], few: Blocks, more: Blocks) -> list[_Alike]:
        """By two steps of few layers; the longer of levels alone that a mix of others does not replace."""
        first: dict[Level, _Alike] = {}
        points: list[tuple[float, float]] = []  # bytes that a level keeps, seconds that it takes
        for level in sorted(found, key=_may_be_replaced):
            costs = found[level]
            if _may_be_replaced(level):  # by what its operations take
                again = _SURELY * sum(costs.seconds) * len(few.blocks)
                point = sum(costs.bytes), first[self.levels[0]].seconds + again
                if len(points) not in _lower_hull([*points, point]):
                    continue
            first[level] = self._of_short(level, few)
            points.append((sum(costs.bytes), first[level].seconds))
        worth = {[*first][place] for place in _lower_hull(points)}
        worth.add(min(first, key=lambda level: first[level].peak))
        self.levels = [one for one in self.levels if one in worth or one.name in POLICIES]
        longer = {level: self._of_short(level, more) for level in self.levels}
        self._longer = [longer[one] for one in self.levels]
        apart = len(more.blocks) - len(few.blocks)
        self._slopes = [(longer[one].head - first[one].head) / apart for one in self.levels]
        self._steps = (self.count - len(more.blocks)) / apart
        known = {one.offloads: one for one in reversed(self.levels)}
        self._ends = {offloads: (one, first[one], longer[one]) for offloads, one in known.items()}
        return [first[level].further(longer[level], self._steps) for level in self.levels]

    def _of_short(self, level: Level, blocks: Blocks) -> _Alike:
        decision = blocks.decision("", [level] * len(blocks.blocks))
        return self._stretches(self.simulate(blocks.program, decision), blocks)

    def _stretches(self, trial: Trial, blocks: Blocks) -> _Alike:
        """Peaks of the stretches of a step."""
        line = trial.memory
        totals = [sum(alive.values()) for alive in line.at]
        inside = self._places(line.operations, blocks)
        end = next(
            (i for i, node in enumerate(line.operations) if self._is_behind(node)), len(totals)
        )
        first, last = (inside[0], inside[-1] + 1) if inside else (end, end)
        forward, head, blocks_too, behind_them = (
            float(max(totals[start:stop], default=0))
            for start, stop in ((0, end), (end, first), (first, last), (last, len(totals)))
        )
        gradients = line.at[min(last, len(totals) - 1)]["gradients"] if totals else 0
        return _Alike(trial.seconds, forward, head, blocks_too, behind_them, gradients)

    def _is_behind(self, node: fx.Node) -> bool:
        """Whether the forward is over; what is computed again of a deep step may come early."""
        again = self.is_deep and "recomputed_from" in meta(node)
        return meta(node)["phase"] != FORWARD and not again

    def _places(self, operations: Sequence[fx.Node], blocks: Blocks) -> list[int]:
        """Where the backward of blocks runs: what reads their values; and what is computed again.

        Of a deep step the first is known to be their backward, and enough.
        """
        inside = (node for block in blocks.blocks for node in block if not self.is_deep)
        names = {meta(node)["name"] for node in inside}
        behind = self._behind if blocks is not self.blocks else _readers(blocks)
        return [
            place
            for place, node in enumerate(operations)
            if meta(node)["phase"] == BACKWARD
            and not is_collective(node)
            and node.target is not torch_internals.WAIT
            and (meta(node).get("recomputed_from") in names or meta(node)["name"] in behind)
        ]

    def _set_costs(self, costs: Sequence[Costs]) -> None:
        """Bytes that each block keeps on each level; its share of what a level takes longer."""
        kinds = self.blocks.kinds
        self._bytes = np.array([[c.bytes[kind] for kind in kinds] for c in costs], float)
        if self._slopes:  # a kernel may keep more than the operation that it computes
            more = np.array(self._slopes) - self._slopes[0]
            self._bytes = self._bytes[:1] + more[:, None]
        seconds = np.array([[c.seconds[kind] for kind in kinds] for c in costs])
        sums = seconds.sum(1, keepdims=True)
        self._shares = np.where(sums > 0, seconds / np.where(sums > 0, sums, 1.0), 1 / self.count)


def between(
    simulate: Simulate, many: int, one: tuple[int, Profile], other: tuple[int, Profile]
) -> Profile:
    """Of a deep step whose head is computed in so many pieces, by two with more and with fewer.

    Each piece takes time of its own, and as many bytes as there are fewer of them.

    Args:
        simulate: with so many pieces.
        one, other: numbers of pieces, and the step with a head of so many.
    """
    (most, first), (fewest, last) = one, other
    found = copy.copy(first)
    found.simulate, found.known = simulate, {}
    time = (many - most) / (fewest - most)
    bytes = (1 / many - 1 / most) / (1 / fewest - 1 / most)
    found.alike, found._longer = (
        [
            replace(here.moved(here, there, bytes), seconds=here.moved(here, there, time).seconds)
            for here, there in zip(*pair, strict=True)
        ]
        for pair in ((first.alike, last.alike), (first._longer, last._longer))
    )
    return found


def _may_be_replaced(level: Level) -> bool:
    """Whether a level differs in nothing but what it computes again: what that takes is known."""
    return not (level.name in POLICIES or level.gathered or level.offloads or level.communicates)


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of points below which no line between two others runs."""
    hull: list[int] = []
    for place in sorted(range(len(points)), key=points.__getitem__):
        while len(hull) > 1 and _is_above(*(points[i] for i in (*hull[-2:], place))):
            hull.pop()
        if not hull or points[place][1] < points[hull[-1]][1]:
            hull.append(place)
    return hull


def _is_above(one: tuple, middle: tuple, other: tuple) -> bool:
    """Whether a point is above the line from one before it to one behind it, or on it."""
    run, rise = other[0] - one[0], other[1] - one[1]
    return (middle[1] - one[1]) * run >= rise * (middle[0] - one[0])


def _readers(blocks: Blocks) -> set[str]:
    """What of the backward reads values that no other part of the forward does."""
    found: set[str] = set()
    for block in blocks.blocks:
        inside = {*block}
        for node in block:
            behind = [user for user in node.users if user not in inside]
            if all(meta(user).get("phase") == BACKWARD for user in behind):
                found |= {meta(user)["name"] for user in behind}
    return found


def _seconds_of(blocks: Blocks, device: Device, fused: bool) -> Mapping[fx.Node, float]:
    """Of the operations of the forward."""
    copy = blocks.program.copy()
    assign_traffic(copy, fused)
    pairs = zip(blocks.nodes, copy.operations(FORWARD), strict=True)
    return {node: operation_seconds(same, device) for node, same in pairs}
