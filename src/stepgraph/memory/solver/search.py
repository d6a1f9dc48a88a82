"""Which blocks keep how much: the least time within a budget, and what each budget takes.

Where bytes and time add up over blocks, mixing two levels is best but for what does not divide: the optimum
of a linear program with one limit. So all mixes of two levels are looked at, in either order: blocks that
run last are best to keep, since their own backward comes first. Beside them the named policies. They are
looked at in the estimate of a :class:`Profile`; the fastest that is estimated to fit is simulated, and the
estimate put right by what it really takes, until none is left that is faster.
"""

import itertools
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from stepgraph.cost.predict import Trial
from stepgraph.memory.presets import FULL, NONE
from stepgraph.memory.solver.frontiers import POINTS, SAME, best_of, spread
from stepgraph.memory.solver.levels import POLICIES
from stepgraph.memory.solver.profile import Mix, Profile
from stepgraph.planning.decisions import FrontierPoint

_TRIALS = 40  # mixes that are simulated for one budget
# And of a deep step: that have so many operations together, but so many at least for its frontier, and one
# more for one budget: one of what offloads tells how far copies fall behind, and another is taken.
_OPERATIONS, _FEWEST = 45_000, 2
_REHEARSALS = (
    8  # short steps that show what is off where levels meet, before a deep one is simulated
)
# Part of its time for which, once something fits, another one is: estimates are not closer than that.
_WORTH = 0.01
_HOPE = 0.1  # part of a step's time, over its blocks
_SMALLEST = 3  # and to find the smallest peak, where none of those fits
_PERIODS = (2, 3, 4)  # of ``layers:N``


_Apart = tuple[float, float]
"""Seconds and bytes."""


@dataclass(frozen=True)
class _Candidate:
    """A mix; ``levels``: what those whose estimates are off alike have in common.

    ``early``: bytes of the level of the first blocks; of two that are as fast, the one with less is first.
    ``away``: levels that offload, and the part of all blocks that is on each.
    """

    profile: Profile
    mix: Mix
    seconds: float
    peak: float
    levels: Hashable
    early: float
    away: tuple[tuple[int, float], ...]

    @property
    def alike(self) -> bool:
        """Whether all blocks keep the same."""
        return len({*self.mix}) == 1

    def trial(self) -> Trial:
        """What it really takes."""
        return self.profile.trial(self.mix)

    def order(self) -> tuple:
        """The fastest first."""
        return self.seconds, self.peak, self.early, self.mix


class _Off:
    """By how much estimates are off: of mixes of the same levels by what one of them really took.

    Args:
        deep: steps whose blocks are alike are estimates as well. Where levels of a mix meet, communication
            overlaps otherwise than within either: what has not been tried may be faster by this.
        blocks: how many there are, to which that is shared out.

    Where a short step has shown two levels that meet, it is that, and what a deep step of the same levels
    took beyond it, in whichever order and with whichever head. In a deep step that offloads, copies fall
    behind, layer after layer, which short ones do not show: as much as more blocks are on such a level.
    """

    def __init__(self, deep: bool, blocks: int) -> None:
        self.deep, self.hope = deep, _HOPE / blocks if deep else 0.0
        self._known: dict[tuple[Profile, Hashable], _Apart] = {}
        self._rehearsed: dict[Hashable, _Apart] = {}
        self._beyond: dict[frozenset[int], _Apart] = {}
        # By level, were all blocks on it; and of how many of them that was seen.
        self._behind: dict[int, _Apart] = {}
        self._seen: dict[int, float] = {}
        self._usual: dict[bool, _Apart] = {}  # by whether it offloads
        self.rehearsals = _REHEARSALS

    def rehearse(self, candidate: _Candidate) -> bool:
        """Whether a short step had to tell how far off an estimate is: of a deep one, of two levels."""
        levels = [*dict.fromkeys(candidate.mix)]
        seen = self.tried(candidate) or candidate.levels in self._rehearsed
        if not self.deep or len(levels) != 2 or seen or not self.rehearsals:
            return False
        self.rehearsals -= 1
        self._rehearsed[candidate.levels] = candidate.profile.rehearsed(*levels)
        return True

    def learn(self, candidate: _Candidate, trial: Trial) -> None:
        """What a candidate really takes."""
        off = trial.seconds - candidate.seconds, trial.memory.peak() - candidate.peak
        seconds, peak = self._rehearsed.get(candidate.levels, (0.0, 0.0))
        beyond = off[0] - seconds, off[1] - peak
        self._known[candidate.profile, candidate.levels] = off
        if self.deep and candidate.away:
            if len(candidate.away) == 1:
                ((level, part),) = candidate.away
                if part >= self._seen.get(level, 0.0):
                    self._seen[level] = part
                    self._behind[level] = beyond[0] / part, beyond[1] / part
            return
        # Where gradients wait for those of other layers, a few layers hold more each than many, where all
        # keep the same; where others keep more, that is not the peak.
        if self.deep and candidate.alike:
            off = off[0], self._usual.get(False, (0.0, 0.0))[1]
        self._usual[bool(candidate.away)] = off
        if candidate.levels in self._rehearsed:
            self._beyond[frozenset(candidate.mix)] = beyond

    def knows(self, candidate: _Candidate) -> bool:
        """Whether anything like it was tried: what offloads tells little of what does not."""
        if self.deep and candidate.away:
            return all(level in self._behind for level, _ in candidate.away)
        return not self.deep or bool(self._usual)

    def tried(self, candidate: _Candidate) -> bool:
        """Whether one of its levels was, in their order."""
        return (candidate.profile, candidate.levels) in self._known

    def gain(self, candidate: _Candidate) -> float:
        """Part of a step's time by which it has to be estimated to take less, to be tried.

        Of a deep step estimates are not closer than that; of one that offloads in a way that was not tried
        they say so little that any gain is worth it.
        """
        sure = self.knows(candidate) or not candidate.away
        return _WORTH if self.deep and sure else SAME

    def right(self, candidate: _Candidate, hopeful: bool = True) -> tuple[float, float]:
        """Its seconds and peak, put right; where all blocks are alike, only of a deep step.

        Args:
            hopeful: a mix of levels that was not tried may be faster; on a level that was not, copies fall
                behind as on one that was. False: nothing is hoped or feared of what was not tried.
        """
        seconds, peak = self._of(candidate, hopeful)
        if hopeful and not self.tried(candidate) and candidate.levels not in self._rehearsed:
            seconds -= self.hope * candidate.seconds
        return candidate.seconds + seconds, candidate.peak + peak

    def _of(self, candidate: _Candidate, hopeful: bool) -> _Apart:
        rehearsed = self._rehearsed.get(candidate.levels)
        if self.deep and candidate.away:
            none = (0.0, 0.0)
            seconds, peak = rehearsed or none
            usual = next(reversed(self._behind.values()), none) if hopeful else none
            for level, part in candidate.away:
                more = self._behind.get(level, usual)
                seconds, peak = seconds + part * more[0], peak + part * more[1]
            return seconds, peak
        if (known := self._known.get((candidate.profile, candidate.levels))) is not None:
            return known
        if rehearsed is not None:
            beyond = self._beyond.get(frozenset(candidate.mix), (0.0, 0.0))
            return rehearsed[0] + beyond[0], rehearsed[1] + beyond[1]
        same = not self.deep and candidate.alike
        return (0.0, 0.0) if same else self._usual.get(bool(candidate.away), (0.0, 0.0))


class Search:
    """Candidates of one Program: mixes with their estimates, the fastest first."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._said: dict[Mix, str] = {}
        mixes = [*dict.fromkeys(self._mixes())]
        alike = dict.fromkeys if profile.is_deep else frozenset  # in which order counts, or not
        self.candidates = sorted(
            (
                _Candidate(
                    profile,
                    mix,
                    *estimate,
                    levels=(*alike(mix),),
                    early=profile.kept_bytes(mix[0]),
                    away=self._away(mix),
                )
                for mix, estimate in zip(mixes, profile.estimates(mixes), strict=True)
            ),
            key=_Candidate.order,
        )

    def within(self, budget: int) -> tuple[Mix | None, int]:
        """The fastest mix whose simulated peak fits, and the smallest peak that is known."""
        found = fastest([self], budget)
        return found and found[1], self.smallest()

    def smallest(self) -> int:
        """The smallest peak that is known; more than there can be where none is."""
        known = self.profile.known.values()
        return min((trial.memory.peak() for trial in known), default=sys.maxsize)

    def fitting(self, budget: int) -> list[Mix]:
        """What was simulated and fits."""
        known = self.profile.known
        return [mix for mix, trial in known.items() if trial.memory.peak() <= budget]

    def named(self) -> list[_Candidate]:
        """What named policies do."""
        profile = self.profile
        named = {profile.uniform(n) for n, one in enumerate(profile.levels) if one.name in POLICIES}
        named |= {self._every(period) for period in _PERIODS if period <= profile.count}
        return [candidate for candidate in self.candidates if candidate.mix in named]

    def simulate_leanest(self) -> None:
        """Mixes that are estimated to take least memory, each another size."""
        least: dict[float, Mix] = {}
        for candidate in sorted(self.candidates, key=lambda c: (c.peak, c.seconds, c.mix)):
            least.setdefault(candidate.peak, candidate.mix)
            if len(least) == _SMALLEST:
                break
        for mix in least.values():
            self.profile.trial(mix)

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """Mixes of which none takes less memory and less time, about evenly spaced along the curve.

        Each is simulated; of a deep program some are, the end of least memory first, then what offloads:
        copies fall behind, layer after layer, which short steps do not show. They show what it takes where
        two levels meet.
        """
        profile = self.profile
        if profile.is_deep:
            return self._frontier_of_deep()
        mix_of = {self._point(c.mix, c.seconds, c.peak): c.mix for c in self.candidates}
        for point in spread(best_of([*mix_of])):
            profile.trial(mix_of[point])
        self.simulate_leanest()
        return spread(best_of([*self._known().values()]))

    def _frontier_of_deep(self) -> tuple[FrontierPoint, ...]:
        known, off = self.profile.known, _Off(True, self.profile.count)
        affordable = _OPERATIONS // len(self.profile.program.graph.nodes)
        off.rehearsals = POINTS if affordable >= _FEWEST else _SMALLEST

        def found() -> dict[FrontierPoint, _Candidate]:
            points = self._known()
            for one in self.candidates:
                sure = one.alike and not one.away
                taken = (one.seconds, one.peak) if sure else off.right(one, hopeful=False)
                points.setdefault(one.mix, self._point(one.mix, *taken))
            return {points[one.mix]: one for one in self.candidates}

        def line() -> list[_Candidate]:
            points = found()
            return [points[point] for point in spread(best_of([*points]))]

        def doubtful() -> _Candidate | None:
            first, *others = line()
            asked = (first, *(one for one in others if one.away))
            return next((one for one in asked if one.mix not in known), None)

        trials = max(_FEWEST, min(2 * _SMALLEST, affordable))
        while trials and (one := doubtful()) is not None:
            if not off.rehearse(one):
                trials -= 1
                off.learn(one, one.trial())
        while any(off.rehearse(one) for one in line() if not one.away):
            pass  # others may be on it then
        least = self.smallest()  # nothing was found to take less
        points = found().items()
        return spread(
            best_of([p for p, one in points if one.mix in known or p.peak_bytes >= least])
        )

    def _away(self, mix: Mix) -> tuple[tuple[int, float], ...]:
        levels = self.profile.levels
        return tuple((n, mix.count(n) / len(mix)) for n in sorted({*mix}) if levels[n].offloads)

    def _known(self) -> dict[Mix, FrontierPoint]:
        """What was simulated."""
        known = self.profile.known.items()
        return {mix: self._point(mix, t.seconds, t.memory.peak()) for mix, t in known}

    def _point(self, mix: Mix, seconds: float, peak: float) -> FrontierPoint:
        return FrontierPoint(round(peak), seconds * 1e3, self.describe(mix))

    def describe(self, mix: Mix) -> str:
        """``blocks 1-20 of 32 full, 21-32 none``."""
        if mix not in self._said:  # of thousands of mixes, again and again
            self._said[mix] = self._in_words(mix)
        return self._said[mix]

    def _in_words(self, mix: Mix) -> str:
        names = [self.profile.levels[number].name for number in mix]
        if len(set(names)) == 1:
            return names[0]
        for period in _PERIODS:
            if mix == self._every(period):
                return f"layers:{period}"
        parts, start = [], 1
        for name, same in itertools.groupby(names):
            stop = start + len([*same]) - 1
            parts.append(f"{start}-{stop} {name}" if stop > start else f"{start} {name}")
            start = stop + 1
        return f"blocks {'; '.join(parts)} (of {len(mix)})"

    def _mixes(self) -> Iterator[Mix]:
        profile, count = self.profile, self.profile.count
        levels = range(len(profile.levels))
        for number in levels:
            yield profile.uniform(number)
        for first, last in itertools.permutations(levels, 2):
            for many in range(1, count):
                yield (first,) * many + (last,) * (count - many)
        for period in _PERIODS:
            if count >= period:
                yield self._every(period)

    def _every(self, period: int) -> Mix:
        """``layers:N``."""
        by_name = {level.name: number for number, level in enumerate(self.profile.levels)}
        none, full = by_name[NONE], by_name.get(FULL, by_name[NONE])
        return tuple(
            full if block % period == period - 1 else none for block in range(self.profile.count)
        )


def fastest(searches: Sequence[Search], budget: int) -> tuple[Search, Mix] | None:
    """The fastest mix whose simulated peak fits, of one Program with its head computed in several ways.

    None: nothing was found to fit; what takes least memory was simulated.
    """
    profile = searches[0].profile
    deep, nodes = profile.is_deep, len(profile.program.graph.nodes)
    off = _Off(deep, profile.count)
    left = [candidate for search in searches for candidate in search.candidates]
    limit = inf
    trials = max(_FEWEST + 1, _OPERATIONS // nodes) if deep else _TRIALS
    away = max(1, trials // 2)  # of all but the last: what else can be done has its turn as well
    while trials:
        righted = ((*off.right(candidate), candidate) for candidate in left)
        fits = [
            (seconds, peak, one)
            for seconds, peak, one in righted
            if peak <= budget and seconds < limit * (1 - off.gain(one))
        ]
        if deep and away <= 0 and trials > 1:
            fits = [row for row in fits if not row[2].away] or fits
        best = min(fits, key=lambda row: (*row[:2], row[2].early, row[2].mix), default=None)
        if best is None:
            break
        candidate = best[2]
        if off.rehearse(candidate):
            continue
        trials, away = trials - 1, away - bool(candidate.away)
        left.remove(candidate)
        trial = candidate.trial()
        off.learn(candidate, trial)
        if trial.memory.peak() <= budget:
            limit = min(limit, trial.seconds)
    # Named policies are no part of what may be left out.
    for candidate in sorted((c for s in searches for c in s.named()), key=_Candidate.order):
        seconds, peak = candidate.seconds, candidate.peak
        if deep:
            seconds, peak = off.right(candidate, hopeful=False)
        worth = seconds < limit * (1 - off.gain(candidate)) or not off.knows(candidate)
        if peak <= budget * (1 + SAME) and worth:
            trial = candidate.trial()
            off.learn(candidate, trial)
            if trial.memory.peak() <= budget:
                limit = min(limit, trial.seconds)
    if not any(search.fitting(budget) for search in searches):
        if deep:
            _simulate_leanest(searches, off)
        for search in searches if not deep else ():
            search.simulate_leanest()
    found = [(s.profile.trial(mix).seconds, mix, s) for s in searches for mix in s.fitting(budget)]
    best = min(found, key=lambda row: row[:2], default=None)
    return best and (best[2], best[1])


def _simulate_leanest(searches: Sequence[Search], off: _Off) -> None:
    """Of a deep step, which takes long: what is estimated to take least memory, the estimate put right."""
    candidates = [candidate for search in searches for candidate in search.candidates]
    trials = _SMALLEST
    while trials:
        righted = [(off.right(candidate, hopeful=False), candidate) for candidate in candidates]
        _, least = min(righted, key=lambda row: (row[0][1], row[0][0], row[1].mix))
        if least.mix in least.profile.known:
            return
        if not off.rehearse(least):
            trials -= 1
            off.learn(least, least.trial())
