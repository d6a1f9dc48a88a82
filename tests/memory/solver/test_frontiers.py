"""Frontiers: what nothing is better than in both, a dozen of it, of all programs of a step."""

from stepgraph.memory.solver.frontiers import best_of, spread, whole_step
from stepgraph.planning.decisions import FrontierPoint


def point(peak, ms, keeps="all"):
    return FrontierPoint(peak, ms, keeps)


def test_what_is_worse_in_both_is_left_out():
    points = [point(5, 1.0), point(1, 9.0), point(3, 9.0), point(3, 4.0), point(6, 1.0)]
    assert best_of(points) == [point(1, 9.0), point(3, 4.0), point(5, 1.0)]


def test_a_dozen_with_both_ends():
    points = [point(100 + i, 100.0 - i) for i in range(50)]
    found = spread(points)
    assert len(found) == 12 and found[0] == points[0] and found[-1] == points[-1]
    assert list(found) == best_of(found)
    assert spread(points[:5]) == tuple(points[:5])


def test_a_step_of_several_programs_runs_each_within_the_same_memory():
    frontiers = {
        "accumulate": [point(2, 8.0, "full"), point(6, 5.0, "none")],
        "step": [point(4, 10.0, "full"), point(5, 9.0, "ops"), point(8, 6.0, "none")],
    }
    assert whole_step(frontiers, micro_batches=3) == (
        point(4, 26.0, "full"),
        point(5, 25.0, "full; ops"),
        point(6, 19.0, "none; ops"),
        point(8, 16.0, "none"),
    )
