"""By how much estimates of mixes are off, and what that says of mixes that were not simulated."""

from collections.abc import Hashable
from dataclasses import dataclass

from stepgraph.cost.predict import Trial
from stepgraph.memory.solver.frontiers import SAME
from stepgraph.memory.solver.profile import Mix, Profile

_REHEARSALS = (
    8  # short steps that show what is off where levels meet, before a deep one is simulated
)
# Part of its time for which, once something fits, another one is: estimates are not closer than that.
_WORTH = 0.01
_HOPE = 0.1  # part of a step's time, over its blocks

_Apart = tuple[float, float]
"""Seconds and bytes."""


@dataclass(frozen=True)
class Candidate:
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


class Off:
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
        self._alike = 0.0  # seconds, of a deep step whose blocks keep the same and offload nothing
        self.rehearsals = _REHEARSALS

    def rehearse(self, candidate: Candidate) -> bool:
        """Whether a short step had to tell how far off an estimate is: of a deep one, of two levels."""
        levels = [*dict.fromkeys(candidate.mix)]
        seen = self.tried(candidate) or candidate.levels in self._rehearsed
        if not self.deep or len(levels) != 2 or seen or not self.rehearsals:
            return False
        self.rehearsals -= 1
        self._rehearsed[candidate.levels] = candidate.profile.rehearsed(*levels)
        return True

    def learn(self, candidate: Candidate, trial: Trial) -> None:
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
            self._alike = off[0]
            off = off[0], self._usual.get(False, (0.0, 0.0))[1]
        self._usual[bool(candidate.away)] = off
        if candidate.levels in self._rehearsed:
            self._beyond[frozenset(candidate.mix)] = beyond

    def knows(self, candidate: Candidate) -> bool:
        """Whether anything like it was tried: what offloads tells little of what does not."""
        if self.deep and candidate.away:
            return all(level in self._behind for level, _ in candidate.away)
        return not self.deep or bool(self._usual)

    def tried(self, candidate: Candidate) -> bool:
        """Whether one of its levels was, in their order."""
        return (candidate.profile, candidate.levels) in self._known

    def gain(self, candidate: Candidate) -> float:
        """Part of a step's time by which it has to be estimated to take less, to be tried.

        Of a deep step estimates are not closer than that; of one that offloads in a way that was not tried
        they say so little that any gain is worth it.
        """
        sure = self.knows(candidate) or not candidate.away
        return _WORTH if self.deep and sure else SAME

    def right(self, candidate: Candidate, hopeful: bool = True) -> tuple[float, float]:
        """Its seconds and peak, put right; where all blocks are alike, only of a deep step.

        Args:
            hopeful: a mix of levels that was not tried may be faster; on a level that was not, copies fall
                behind as on one that was. False: nothing is hoped or feared of what was not tried.
        """
        seconds, peak = self._of(candidate, hopeful)
        if hopeful and not self.tried(candidate) and candidate.levels not in self._rehearsed:
            seconds -= self.hope * candidate.seconds
        return candidate.seconds + seconds, candidate.peak + peak

    def say(self, candidate: Candidate) -> tuple[float, float]:
        """What a frontier says of a mix that was not simulated: seconds and peak of a deep step.

        Where nothing offloads: by how many seconds one was off whose blocks keep the same, others like it
        are, too. Where a short step has shown two levels that meet, others are off beyond that as the last
        such mix was; or where none was simulated, as one whose blocks keep the same.
        """
        seconds, peak = self.right(candidate, hopeful=False)
        if candidate.alike and not candidate.away:
            return candidate.seconds + self._alike, candidate.peak
        levels = frozenset(candidate.mix)
        if (
            not candidate.away
            and candidate.levels in self._rehearsed
            and levels not in self._beyond
        ):
            of_others = [more for more, _ in self._beyond.values()]
            seconds += of_others[-1] if of_others else self._alike
        return seconds, peak

    def _of(self, candidate: Candidate, hopeful: bool) -> _Apart:
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
