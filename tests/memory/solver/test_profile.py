"""What a step takes by which block keeps how much: estimates are what is simulated."""

import pytest

from stepgraph.memory.solver import profile as profiles
from stepgraph.memory.solver.levels import find_levels
from stepgraph.memory.solver.profile import Profile
from stepgraph.pipeline import simulation
from stepgraph.planning.target import target_of
from tests.memory.solver.search_support import DEVICE, llama_search, placed, plan_on
from tests.support import tower


@pytest.fixture(scope="module")
def deep():
    """Of ten layers, which are estimated by two and by four of them."""
    before, profiles.MANY = profiles.MANY, 100
    try:
        plan = plan_on()
        program = placed(*tower(10), plan)
        found = Profile(program, True, simulation(plan, target_of(DEVICE)), DEVICE, fused=True)
    finally:
        profiles.MANY = before
    assert found.is_deep and not found.known
    return found


def test_of_a_deep_step_short_ones_say_what_it_takes(deep):
    for number in range(0, len(deep.levels), 3):
        mix = deep.uniform(number)
        estimate, trial = deep.estimate(mix), deep.trial(mix)
        assert estimate.seconds == pytest.approx(trial.seconds, rel=2e-3)
        assert estimate.peak == pytest.approx(trial.memory.peak(), rel=2e-3)


def test_of_mixes_too(deep):
    first, last = 1, 0
    for many in (3, 7):
        mix = (first,) * many + (last,) * (deep.count - many)
        estimate, trial = deep.estimate(mix), deep.trial(mix)
        assert estimate.seconds == pytest.approx(trial.seconds, rel=1e-2)
        assert estimate.peak == pytest.approx(trial.memory.peak(), rel=1e-2)


def test_of_a_deep_step_only_levels_stay_that_no_mix_replaces(deep):
    names = [level.name for level in deep.levels]
    assert {"none", "full", "ops"} <= set(names)
    seconds = dict.fromkeys(deep.blocks.nodes, 1e-6)
    every = find_levels(deep.blocks, seconds, to_host=True)
    assert set(names) < {level.name for level in every}


def test_others_are_simulated_with_each_level():
    profile = llama_search().profile
    assert not profile.is_deep
    assert {profile.uniform(n) for n in range(len(profile.levels))} <= profile.known.keys()
    mix = profile.uniform(1)
    assert profile.estimate(mix).peak == profile.trial(mix).memory.peak()


def test_the_lower_hull():
    points = [(0, 10), (1, 9.5), (2, 2), (3, 1.5), (4, 0), (5, 0)]
    assert profiles._lower_hull(points) == [0, 2, 4]
