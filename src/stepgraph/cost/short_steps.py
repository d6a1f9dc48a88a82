"""What a deep step takes by what two steps of few of its layers do.

What a layer adds is the same however deep a step is, but for collectives of several layers that run as one:
the short steps may have one for all of their layers, where the whole has several that overlap with more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepgraph.analysis.layers import find_layers
from stepgraph.cost.collectives import Group, collective_seconds
from stepgraph.cost.predict import Prediction
from stepgraph.program.program import Program

# Layers that the two short steps differ in: memory policies may recompute every second one, and collectives
# of neighbours may be merged.
APART = 2
# A whole step may take less than is said by so much: where each layer has collectives of its own, and else.
_APART_SURELY, _MERGED_SURELY = 1.002, 1.1


@dataclass(frozen=True)
class Said:
    """What short steps say of the whole.

    ``least_ms``: what it takes at least; ``exact``: it takes what is said.
    """

    whole: Prediction
    least_ms: float
    exact: bool


@dataclass(frozen=True)
class ShortSteps:
    """Two steps of few layers of a deep one, and how many of their difference it has beyond the first."""

    programs: tuple[dict[str, Program], dict[str, Program]]
    steps: float

    def say(self, few: Prediction, more: Prediction, wires: Mapping[str, Group]) -> Said:
        """What a deep step takes by what the two do: its time and its peak.

        Args:
            wires: of mesh dimensions. At best, all that is sent for several layers at once takes no time.
        """
        time, peak = (
            self._line(getattr(few, w), getattr(more, w)) for w in ("step_ms", "peak_bytes")
        )
        none = {"count": 0, "bytes": 0}
        together = 0.0
        for key, row in more.collectives_by_dim.items():
            before, (_, kind, mesh_dim) = few.collectives_by_dim.get(key, none), key
            if row["bytes"] > before["bytes"] and row["count"] < before["count"] + APART:
                sent = self._line(before["bytes"], row["bytes"])
                together += 1e3 * float(collective_seconds(kind, sent, wires[mesh_dim]))
        exact = together <= time * (_APART_SURELY - 1)
        least = max(time / _MERGED_SURELY, time / _APART_SURELY - together)
        return Said(replace(more, step_ms=time, peak_bytes=peak), least, exact)

    def _line(self, few: float, more: float) -> float:
        return few + (more - few) * self.steps


def short_steps(programs: Mapping[str, Program]) -> ShortSteps | None:
    """Steps of as few layers as there can be, and of some more; None where layers do not repeat."""
    found = {name: find_layers(program) for name, program in programs.items()}
    layers = {name: known for name, known in found.items() if known is not None}
    most = min((known.most for known in layers.values()), default=0)
    if len(layers) < len(found) or most < 2 * APART:
        return None
    few, more = (
        {name: known.without(count) for name, known in layers.items()}
        for count in (most, most - APART)
    )
    return ShortSteps((few, more), most / APART)
