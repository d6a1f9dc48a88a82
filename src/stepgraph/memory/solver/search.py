"""Which blocks keep how much: the least time within a budget, and what each budget takes.

Where bytes and time add up over blocks, mixing two levels is best but for what does not divide: the optimum
of a linear program with one limit. So all mixes of two levels are looked at, in either order: blocks that
run last are best to keep, since their own backward comes first. Beside them the named policies. They are
looked at in the estimate of a :class:`Profile`; the fastest that is estimated to fit is simulated, and the
estimate put right by what it really takes, until none is left that is faster.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from stepgraph.cost.predict import Trial
from stepgraph.memory.presets import FULL, NONE
from stepgraph.memory.solver.frontiers import SAME, best_of, spread
from stepgraph.memory.solver.levels import POLICIES
from stepgraph.memory.solver.profile import Mix, Profile
from stepgraph.planning.decisions import FrontierPoint

_TRIALS, _TRIALS_IN_DEPTH = 40, 5  # mixes that are simulated for one budget
_SMALLEST = 3  # and to find the smallest peak, where none of those fits
_PERIODS = (2, 3, 4)  # of ``layers:N``


@dataclass(frozen=True)
class _Candidate:
    mix: Mix
    seconds: float
    peak: float


class _Off:
    """By how much estimates are off: of mixes of the same levels by what one of them really took."""

    def __init__(self) -> None:
        self._seconds: dict[frozenset[int], float] = {}
        self._peaks: dict[frozenset[int], float] = {}
        self._usual = (0.0, 0.0)

    def learn(self, candidate: _Candidate, trial: Trial) -> None:
        """What a candidate really takes."""
        levels = frozenset(candidate.mix)
        self._seconds[levels] = trial.seconds - candidate.seconds
        self._peaks[levels] = trial.memory.peak() - candidate.peak
        self._usual = self._seconds[levels], self._peaks[levels]

    def right(self, candidate: _Candidate) -> tuple[float, float]:
        """Seconds and peak of a candidate, put right; where all blocks are alike, it is so."""
        levels = frozenset(candidate.mix)
        usual = self._usual if len(levels) > 1 else (0.0, 0.0)
        seconds, peak = self._seconds.get(levels, usual[0]), self._peaks.get(levels, usual[1])
        return candidate.seconds + seconds, candidate.peak + peak


class Search:
    """Candidates of one Program: mixes with their estimates, the fastest first."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        found = {mix: profile.estimate(mix) for mix in self._mixes()}
        candidates = (_Candidate(mix, e.seconds, e.peak) for mix, e in found.items())
        self.candidates = sorted(candidates, key=lambda one: (one.seconds, one.peak, one.mix))

    def within(self, budget: int) -> tuple[Mix | None, int]:
        """The fastest mix whose simulated peak fits, and the smallest peak that is known."""
        profile, off = self.profile, _Off()
        best: Mix | None = None
        tried: set[Mix] = set()
        for _ in range(_TRIALS_IN_DEPTH if profile.is_deep else _TRIALS):
            limit = inf if best is None else profile.trial(best).seconds * (1 - SAME)
            left = ((c, *off.right(c)) for c in self.candidates if c.mix not in tried)
            fits = (c for c, time, peak in left if time < limit and peak <= budget)
            candidate = next(fits, None)
            if candidate is None:
                break
            tried.add(candidate.mix)
            trial = profile.trial(candidate.mix)
            off.learn(candidate, trial)
            if trial.memory.peak() <= budget and trial.seconds < limit:
                best = candidate.mix
        self._simulate_named(budget, best)
        known = profile.known
        if not any(trial.memory.peak() <= budget for trial in known.values()):
            self._simulate_leanest()
        fitting = [mix for mix, trial in known.items() if trial.memory.peak() <= budget]
        best = min(fitting, key=lambda mix: (known[mix].seconds, mix), default=None)
        return best, min(trial.memory.peak() for trial in known.values())

    def _simulate_named(self, budget: int, best: Mix | None) -> None:
        """Named policies that may be faster than the best that was found, if any of it was."""
        profile = self.profile
        named = {profile.uniform(n) for n, one in enumerate(profile.levels) if one.name in POLICIES}
        named |= {self._every(period) for period in _PERIODS if period <= profile.count}
        for candidate in self.candidates:
            limit = inf if best is None else profile.trial(best).seconds * (1 - SAME)
            if candidate.seconds >= limit:
                break
            may_fit = candidate.mix in named and candidate.peak <= budget
            if may_fit and profile.trial(candidate.mix).memory.peak() <= budget:
                best = candidate.mix

    def _simulate_leanest(self) -> None:
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

        Each is simulated; of a deep program the end of least memory is, and the others are estimates.
        """
        profile = self.profile
        point_of = {c.mix: self._point(c.mix, c.peak, c.seconds) for c in self.candidates}
        mix_of = {point: mix for mix, point in point_of.items()}
        if profile.is_deep:
            for _ in range(_SMALLEST):
                point_of |= self._known()
                least = best_of([*point_of.values()])[0]
                if least not in mix_of or mix_of[least] in profile.known:
                    break
                profile.trial(mix_of[least])
            return spread(best_of([*(point_of | self._known()).values()]))
        for point in spread(best_of([*mix_of])):
            profile.trial(mix_of[point])
        self._simulate_leanest()
        return spread(best_of([*self._known().values()]))

    def _known(self) -> dict[Mix, FrontierPoint]:
        """What was simulated."""
        known = self.profile.known.items()
        return {mix: self._point(mix, t.memory.peak(), t.seconds) for mix, t in known}

    def _point(self, mix: Mix, peak: float, seconds: float) -> FrontierPoint:
        return FrontierPoint(round(peak), seconds * 1e3, self.describe(mix))

    def describe(self, mix: Mix) -> str:
        """``blocks 1-20 of 32 full, 21-32 none``."""
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
