"""Memory against time: of many ways to run a step those that none is better than in both."""

from collections.abc import Mapping, Sequence

from stepgraph.planning.decisions import FrontierPoint

POINTS = 12  # at most
SAME = 1e-4  # part of the time: what is faster by less is not another point


def best_of(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Those that no other is below in memory and time, least memory first."""
    found: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.step_ms, p.keeps)):
        if not found or point.step_ms < found[-1].step_ms * (1 - SAME):
            found.append(point)
    return found


def spread(points: Sequence[FrontierPoint], most: int = POINTS) -> tuple[FrontierPoint, ...]:
    """So many of them at most, first and last in, about evenly spaced along the curve."""
    if len(points) <= most:
        return tuple(points)
    first, last = points[0], points[-1]
    memory, time = last.peak_bytes - first.peak_bytes, first.step_ms - last.step_ms

    def along(place: int) -> float:
        point = points[place]
        sizes = (point.peak_bytes - first.peak_bytes) / memory
        return sizes + (first.step_ms - point.step_ms) / time

    places = {0, len(points) - 1}
    for number in range(1, most - 1):
        left = (place for place in range(len(points)) if place not in places)
        wanted = 2 * number / (most - 1)
        places.add(min(left, key=lambda place: abs(along(place) - wanted)))  # noqa: B023
    return tuple(points[place] for place in sorted(places))


def whole_step(
    frontiers: Mapping[str, Sequence[FrontierPoint]], micro_batches: int
) -> tuple[FrontierPoint, ...]:
    """The frontier of a step of several programs, each within the same memory.

    Args:
        frontiers: of each program, as :func:`best_of` has them.
        micro_batches: of the step: all but the last are run by ``accumulate``.
    """
    runs = {name: 1 if name == "step" else micro_batches - 1 for name in frontiers}
    least = max(points[0].peak_bytes for points in frontiers.values())
    sizes = {point.peak_bytes for points in frontiers.values() for point in points}
    found = []
    for size in sorted(size for size in sizes if size >= least):
        taken = {
            name: max((p for p in points if p.peak_bytes <= size), key=lambda p: p.peak_bytes)
            for name, points in frontiers.items()
        }
        keeps = dict.fromkeys(point.keeps for point in taken.values())
        found.append(
            FrontierPoint(
                max(point.peak_bytes for point in taken.values()),
                sum(runs[name] * point.step_ms for name, point in taken.items()),
                "; ".join(keeps),
            )
        )
    return spread(best_of(found))
