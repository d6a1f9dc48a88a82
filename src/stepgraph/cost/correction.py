"""A cost model corrected by what was measured of a run: three factors, as data.

A step gives one number, its time, from which compute and communication cannot be told apart. So the step's
collectives are timed by themselves as well: what they take over what they are predicted to take is the
factor of communication, and that of compute is such that the step then takes what it takes. A factor is one
for all operations (all collectives, of every kind and mesh dimension): what is wrong of one of them alone
is corrected in the mean of the step that was measured, and not for another mix of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from stepgraph.cost.device import Device, Link
from stepgraph.cost.predict import Prediction

# A time that is off by less is right: so far off are the worst predictions for a machine that was measured
# (benchmarks/predictions.py: 15 %), and what a busy machine adds. And a peak: an allocator rounds up.
TIME_RIGHT, PEAK_RIGHT = 1.2, 1.1
_FARTHEST = 100.0, 1e4  # a factor of computing is looked for so far below and above the known one
_EXACT, _ROUNDS = 1e-3, 40

Factor = Annotated[float, Meta(gt=0, le=1e9)]


@dataclass(frozen=True)
class Correction:
    """Measured over predicted: what a device's own numbers are multiplied by.

    Attributes:
        compute: seconds of every operation on the compute stream.
        communication: seconds of every collective. Copies to the host and back are as they are.
        memory: bytes at a step's peak; budgets are compared with peaks that are so much larger.
    """

    compute: Factor = 1.0
    communication: Factor = 1.0
    memory: Factor = 1.0

    def __str__(self) -> str:
        factors = (f"{name} x {factor:.3g}" for name, factor in vars(self).items() if factor != 1.0)
        return ", ".join(factors) or "nothing"


AS_IT_IS = Correction()


@dataclass(frozen=True)
class Measured:
    """What steps took on the slowest rank.

    Attributes:
        step_ms: of a step, micro-batches and update included: the median.
        communication_ms: of its collectives, each timed by itself; None: there are none.
        peak_bytes: of the rank with most; None: nobody counts.
        peak_at_least: not all of its bytes are seen: only a larger peak than predicted says something.
    """

    step_ms: float
    communication_ms: float | None = None
    peak_bytes: int | None = None
    peak_at_least: bool = False


def corrected(device: Device, correction: Correction) -> Device:
    """The device whose operations and collectives take so much longer; its capacity stays."""
    if correction == AS_IT_IS:
        return device
    slower, sent = correction.compute, correction.communication

    def link(one: Link) -> Link:
        return Link(one.latency * sent, one.bandwidth / sent)

    return replace(
        device,
        matmul={dtype: rate / slower for dtype, rate in device.matmul.items()},
        memory_bandwidth=device.memory_bandwidth / slower,
        kernel_seconds=device.kernel_seconds * slower,
        dispatch_seconds=device.dispatch_seconds * slower,
        elements={kind: seconds * slower for kind, seconds in device.elements.items()},
        caches=tuple((size, rate / slower) for size, rate in device.caches),
        intra=link(device.intra),
        inter=link(device.inter),
        collectives={kind: link(one) for kind, one in device.collectives.items()},
    )


def correct(
    measured: Measured,
    predict: Callable[[Correction], Prediction],
    known: Correction = AS_IT_IS,
) -> Correction:
    """The correction under which what was measured is what is predicted; ``known``, where that is right.

    Where the collectives alone would take longer than the step (they were timed on a busier machine), both
    factors are what the step takes over what it is predicted to take.

    Args:
        predict: what the step that was measured takes under a correction.
        known: the correction in force.
    """
    before = predict(known)
    found = known
    timed = measured.communication_ms
    if timed and before.communication_ms and not _near(timed, before.communication_ms, TIME_RIGHT):
        found = replace(
            found, communication=_limited(known.communication * timed / before.communication_ms)
        )

    def step_ms(compute: float) -> float:
        return predict(replace(found, compute=compute)).step_ms

    if not _near(measured.step_ms, step_ms(known.compute), TIME_RIGHT):
        compute = _solve(step_ms, measured.step_ms, known.compute)
        if compute is not None:
            found = replace(found, compute=_limited(compute))
        else:
            every = measured.step_ms / before.step_ms
            found = replace(
                known,
                compute=_limited(known.compute * every),
                communication=_limited(known.communication * every),
            )
    if measured.peak_bytes and before.peak_bytes:
        memory = measured.peak_bytes / before.peak_bytes
        says = memory > known.memory or not measured.peak_at_least
        if says and not _near(memory, known.memory, PEAK_RIGHT):
            found = replace(found, memory=_limited(memory))
    return found


def _near(one: float, other: float, factor: float) -> bool:
    return other / factor <= one <= other * factor


def _limited(factor: float) -> float:
    """What can be written into a plan; the digits of a measurement."""
    return float(f"{min(max(factor, 1e-6), 1e9):.4g}")


def _solve(step_ms: Callable[[float], float], wanted: float, start: float) -> float | None:
    """The factor under which a step takes so long; None where it takes longer under any.

    The step's time grows with it, in a line but for what overlaps: so the next guess is where the line
    through both ends is, and the middle where that does not bring the ends together.
    """
    low, high = start / _FARTHEST[0], start * _FARTHEST[1]
    below, above = step_ms(low), step_ms(high)
    if below >= wanted * (1 - _EXACT):
        return None
    if above <= wanted:
        return high
    for number in range(_ROUNDS):
        by_line = number % 3 < 2
        at = (
            low + (high - low) * (wanted - below) / (above - below)
            if by_line
            else (low * high) ** 0.5
        )
        now = step_ms(at)
        if _near(now, wanted, 1 + _EXACT):
            return at
        low, below, high, above = (at, now, high, above) if now < wanted else (low, below, at, now)
    return (low * high) ** 0.5
