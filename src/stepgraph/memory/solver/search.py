"""Which blocks keep how much: the least time within a budget, and what each budget takes.

Where bytes and time add up over blocks, mixing two levels is best but for what does not divide: the optimum
of a linear program with one limit. So all mixes of two levels are looked at, in either order: blocks that
run last are best to keep, since their own backward comes first. Beside them the named policies. They are
looked at in the estimate of a :class:`Profile`; the fastest that is estimated to fit is simulated, and the
estimate put right by what it really takes, until none is left that is faster.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from math import inf

from stepgraph.memory.presets import FULL, NONE
from stepgraph.memory.solver.frontiers import POINTS, SAME, best_of, spread
from stepgraph.memory.solver.levels import POLICIES
from stepgraph.memory.solver.off import Candidate, Off
from stepgraph.memory.solver.profile import Mix, Profile
from stepgraph.planning.decisions import FrontierPoint

_TRIALS = 40  # mixes that are simulated for one budget
# And of a deep step: that have so many operations together, but so many at least for its frontier, and one
# more for one budget: one of what offloads tells how far copies fall behind, and another is taken.
_OPERATIONS, _FEWEST = 45_000, 2
_SMALLEST = 3  # and to find the smallest peak, where none of those fits
_PERIODS = (2, 3, 4)  # of ``layers:N``


class Search:
    """Candidates of one Program: mixes with their estimates, the fastest first."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._said: dict[Mix, str] = {}
        mixes = [*dict.fromkeys(self._mixes())]
        alike = dict.fromkeys if profile.is_deep else frozenset  # in which order counts, or not
        self.candidates = sorted(
            (
                Candidate(
                    profile,
                    mix,
                    *estimate,
                    levels=(*alike(mix),),
                    early=profile.kept_bytes(mix[0]),
                    away=self._away(mix),
                )
                for mix, estimate in zip(mixes, profile.estimates(mixes), strict=True)
            ),
            key=Candidate.order,
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

    def named(self) -> list[Candidate]:
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

        Each is simulated; of a deep program some are: the end of least memory, the other end, then what
        offloads (copies fall behind, layer after layer, which short steps do not show; they show what it
        takes where two levels meet), then others. Of the deepest there is no time for the other end.
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
        known, off = self.profile.known, Off(True, self.profile.count)
        affordable = _OPERATIONS // len(self.profile.program.graph.nodes)
        off.rehearsals = POINTS if affordable >= _FEWEST else _SMALLEST

        def found() -> dict[FrontierPoint, Candidate]:
            points = self._known()
            for one in self.candidates:
                points.setdefault(one.mix, self._point(one.mix, *off.say(one)))
            return {points[one.mix]: one for one in self.candidates}

        def line() -> list[Candidate]:
            points = found()
            return [points[point] for point in spread(best_of([*points]))]

        def doubtful() -> Candidate | None:
            first, *others = line()
            last = others[-1:] if both else ()
            away = (one for one in others if one.away)
            asked = (first, *last, *away, *(reversed(others) if both else ()))
            return next((one for one in asked if one.mix not in known), None)

        both = affordable > _FEWEST
        trials = max(_FEWEST, min(2 * _SMALLEST, affordable)) + both
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
    off = Off(deep, profile.count)
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
    for candidate in sorted((c for s in searches for c in s.named()), key=Candidate.order):
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


def _simulate_leanest(searches: Sequence[Search], off: Off) -> None:
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
