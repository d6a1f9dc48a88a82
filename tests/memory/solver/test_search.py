"""The fastest that fits: as exhaustive search has it, and never worse than a named policy."""

import itertools
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest

from stepgraph.memory.by_policy import decide_by_policy
from stepgraph.memory.solver import profile as profiles
from stepgraph.memory.solver import search as search_room
from stepgraph.memory.solver.off import Candidate, Off
from stepgraph.pipeline import simulation
from stepgraph.planning.decisions import MemoryDecision
from tests.memory.solver.search_support import (
    DEVICE,
    llama_program,
    llama_search,
    llama_search_without_host,
    narrowing,
    placed,
    plan_on,
    search_of,
    stacks,
)
from tests.support import HOST, tiny_llama, token_batch

NAMED = ("none", "full", "ops", "layers:2", "layers:3")


@pytest.fixture(scope="module")
def small():
    """A program, and what it takes whatever is recomputed of all that may be."""
    plan = plan_on("ddp")
    program = placed(*narrowing(), plan)
    simulate = simulation(plan, HOST)
    names = list(decide_by_policy(program, "full").recompute)
    names = [name for name in names if name not in ("pow", "mean")]  # the backward needs neither
    every = [
        simulate(program, MemoryDecision("", dict.fromkeys(chosen, 0)))
        for count in range(len(names) + 1)
        for chosen in itertools.combinations(names, count)
    ]
    return program, plan, [(trial.memory.peak(), trial.seconds) for trial in every]


def budgets_of(taken, count=8):
    low, high = min(peak for peak, _ in taken), max(peak for peak, _ in taken)
    return [int(low + (high - low) * i / (count - 1)) for i in range(count)]


def test_on_a_small_graph_it_is_what_exhaustive_search_finds(small):
    program, plan, every = small
    search = search_of(program, plan, gather_again=False)
    assert min(peak for peak, _ in every) == search.within(1)[1]
    for budget in budgets_of(every):
        mix, _ = search.within(budget)
        found = search.profile.trial(mix)
        assert found.memory.peak() <= budget
        fitting = [seconds for peak, seconds in every if peak <= budget]
        assert found.seconds == pytest.approx(min(fitting), rel=1e-9)


@pytest.mark.parametrize("model", ["llama", "two kinds of blocks"])
def test_it_is_no_slower_than_the_best_named_policy_that_fits(model):
    search, program, preset = llama_search(), llama_program(), "zero3"
    if model != "llama":
        preset = "ddp"
        program = placed(*stacks(), plan_on(preset))
        search = search_of(program, plan_on(preset), gather_again=False)
    simulate = simulation(plan_on(preset), HOST)
    trials = [simulate(program, decide_by_policy(program, name)) for name in NAMED]
    named = [(trial.memory.peak(), trial.seconds) for trial in trials]
    for budget in budgets_of(named):
        mix, _ = search.within(budget)
        found = search.profile.trial(mix)
        assert found.memory.peak() <= budget
        assert found.seconds <= min(s for peak, s in named if peak <= budget) * (1 + 1e-9)


def test_what_cannot_be_met_says_the_smallest_peak():
    search = llama_search()
    mix, smallest = search.within(1000)
    assert mix is None
    assert search.within(smallest)[0] is not None
    assert search.within(smallest - 1)[0] is None


def test_more_memory_never_takes_more_time():
    search = llama_search_without_host()
    points = search.frontier()
    assert 8 <= len(points) <= 12
    for one, other in itertools.pairwise(points):
        assert one.peak_bytes < other.peak_bytes and one.step_ms > other.step_ms
    for point in points[::3]:
        mix, _ = search.within(point.peak_bytes)
        assert search.profile.trial(mix).seconds * 1e3 <= point.step_ms * (1 + 1e-9)


def test_with_a_link_to_the_host_little_memory_costs_little_time():
    kept, *_, leanest = reversed(llama_search_without_host(6).frontier())
    points = llama_search(6).frontier()
    for one, other in itertools.pairwise(points):
        assert one.peak_bytes < other.peak_bytes and one.step_ms > other.step_ms
    offloaded = next(point for point in points if point.keeps == "none, offloaded")
    assert offloaded.peak_bytes < kept.peak_bytes / 2
    assert offloaded.step_ms < leanest.step_ms and offloaded.step_ms < 1.02 * kept.step_ms


@pytest.fixture(scope="module")
def ten_layers():
    return placed(tiny_llama(10, num_key_value_heads=2), token_batch(256, 256), plan_on())


def deep_search(program, **asked):
    """Estimated by two and by four layers."""
    before, profiles.MANY = profiles.MANY, 100
    try:
        search = search_of(program, plan_on(), **asked)
    finally:
        profiles.MANY = before
    assert search.profile.is_deep and not search.profile.known
    return search


@pytest.fixture(scope="module")
def deep(ten_layers):
    """Copies to the host fall behind."""
    return deep_search(ten_layers)


def test_what_offloads_of_a_deep_step_is_as_slow_as_it_will_be(deep):
    points = deep.frontier()
    mix_of = {deep.describe(one.mix): one.mix for one in deep.candidates}
    assert mix_of[points[0].keeps] in deep.profile.known
    away = [point for point in points if "offloaded" in point.keeps]
    assert len(away) > 3
    trials = [deep.profile.trial(mix_of[point.keeps]) for point in away]
    pairs = [*zip(away, trials, strict=True)]
    assert mean(abs(p.peak_bytes / t.memory.peak() - 1) for p, t in pairs) < 0.02
    assert mean(abs(p.step_ms / t.seconds / 1e3 - 1) for p, t in pairs) < 0.01


def test_what_a_deep_step_holds_where_two_levels_meet_is_seen_on_a_short_one(ten_layers):
    search = deep_search(ten_layers, device=replace(DEVICE, host=None))
    points = search.frontier()
    assert len(search.profile.known) < len(points)
    mix_of = {search.describe(one.mix): one.mix for one in search.candidates}
    trials = [search.profile.trial(mix_of[point.keeps]) for point in points]
    for point, trial in zip(points, trials, strict=True):
        assert point.peak_bytes > 0.99 * trial.memory.peak(), point
        assert point.step_ms == pytest.approx(trial.seconds * 1e3, rel=1e-3), point


def test_of_a_deep_step_both_ends_are_simulated(deep):
    points = deep.frontier()
    mix_of = {deep.describe(one.mix): one.mix for one in deep.candidates}
    for point in (points[0], points[-1]):
        trial = deep.profile.known[mix_of[point.keeps]]
        assert (point.peak_bytes, point.step_ms) == (trial.memory.peak(), trial.seconds * 1e3)


class Eighty:
    """A profile of eighty blocks; on level 0 copies fall behind, which estimates do not know."""

    really = (11.2, 7.5, 30.0)  # by level, were all blocks on it

    def __init__(self):
        self.known = {}

    def rehearsed(self, first, last):
        return 0.0, 0.0

    def trial(self, mix):
        peak = sum(map(self.really.__getitem__, mix)) / len(mix)
        memory = SimpleNamespace(peak=lambda: peak)
        return self.known.setdefault(mix, SimpleNamespace(seconds=1.0, memory=memory))

    def candidate(self, mix):
        peak = sum(map((7.4, 7.65, 30.0, 90.0).__getitem__, mix)) / len(mix)
        away = tuple((level, mix.count(level) / 80) for level in (0, 1) if level in mix)
        return Candidate(self, mix, 1.0, peak, tuple(dict.fromkeys(mix)), 0.0, away)


def test_that_copies_fall_behind_on_one_level_says_nothing_of_another():
    profile = Eighty()
    mixes = [(0,) * 80, *((0,) * many + (1,) * (80 - many) for many in (79, 78, 77, 76)), (1,) * 80]
    searches = [SimpleNamespace(candidates=[profile.candidate(mix) for mix in mixes])]
    search_room._simulate_leanest(searches, Off(True, 80))
    assert min(trial.memory.peak() for trial in profile.known.values()) == 7.5


def test_how_far_copies_fall_behind_counts_as_often_as_blocks_are_on_a_level():
    profile, off = Eighty(), Off(True, 80)
    learned = profile.candidate((0,) * 60 + (2,) * 20)
    off.learn(learned, learned.trial())
    for many in (80, 40, 8):
        other = profile.candidate((0,) * many + (2,) * (80 - many))
        real = other.trial().memory.peak()
        assert off.right(other, hopeful=False)[1] == pytest.approx(real)


def test_a_peak_where_all_blocks_keep_the_same_says_nothing_of_others():
    profile, off = Eighty(), Off(True, 80)
    memory = SimpleNamespace(peak=lambda: 10.0)
    off.learn(profile.candidate((2,) * 80), SimpleNamespace(seconds=1.5, memory=memory))
    mix = profile.candidate((2,) * 40 + (3,) * 40)
    assert off.right(mix, hopeful=False) == (1.5, mix.peak)


def test_seconds_where_all_blocks_keep_the_same_count_wherever_nothing_offloads():
    profile, off = Eighty(), Off(True, 80)
    memory = SimpleNamespace(peak=lambda: 10.0)
    off.learn(profile.candidate((2,) * 80), SimpleNamespace(seconds=1.5, memory=memory))
    assert off.say(profile.candidate((3,) * 80)) == (1.5, 90.0)
    for mix in ((2,) * 40 + (3,) * 40, (3,) * 40 + (2,) * 40):
        one = profile.candidate(mix)
        assert off.rehearse(one)
        assert off.say(one) == (1.5, one.peak)
    away = profile.candidate((0,) * 80)
    assert off.say(away) == (away.seconds, away.peak)


def test_an_untried_way_to_offload_is_worth_a_trial_for_any_gain():
    def found(away, estimated):
        profile = Eighty()
        profile.is_deep, profile.count = True, 80
        profile.program = SimpleNamespace(graph=SimpleNamespace(nodes=range(20_000)))
        first, other = (2,) * 80, (0,) * 80
        seconds = {first: 1.0, other: 0.9}
        memory = SimpleNamespace(peak=lambda: 7.5)
        profile.trial = lambda mix: profile.known.setdefault(
            mix, SimpleNamespace(seconds=seconds[mix], memory=memory)
        )
        candidates = [
            replace(profile.candidate(first), seconds=0.99, peak=7.5),
            replace(profile.candidate(other), seconds=estimated, away=away),
        ]
        search = SimpleNamespace(
            profile=profile, candidates=candidates, named=list, fitting=lambda _: [*profile.known]
        )
        return search_room.fastest([search], 8)[1]

    offloads = ((0, 1.0),)
    assert found(offloads, 0.998)[0] == 0  # really faster by a tenth
    assert found(offloads, 1.002)[0] == 2
    assert found((), 0.998)[0] == 2  # an estimate of what does not offload is about right


def test_in_the_deepest_steps_too_what_offloads_is_tried_once_more():
    profile = Eighty()
    profile.is_deep, profile.count = True, 80
    profile.program = SimpleNamespace(graph=SimpleNamespace(nodes=range(60_000)))
    most, fewer, none = (0,) * 60 + (2,) * 20, (0,) * 20 + (2,) * 60, (2,) * 80
    estimated = {most: (0.90, 7.5), fewer: (0.94, 7.0), none: (0.97, 7.0)}
    taken = {most: (0.92, 8.7), fewer: (0.945, 7.4), none: (0.97, 7.0)}

    def trial(mix):
        seconds, peak = taken[mix]
        memory = SimpleNamespace(peak=lambda: peak)
        return profile.known.setdefault(mix, SimpleNamespace(seconds=seconds, memory=memory))

    def fitting(budget):
        return [mix for mix, trial in profile.known.items() if trial.memory.peak() <= budget]

    profile.trial = trial
    candidates = [
        replace(profile.candidate(mix), seconds=seconds, peak=peak)
        for mix, (seconds, peak) in estimated.items()
    ]
    search = SimpleNamespace(profile=profile, candidates=candidates, named=list, fitting=fitting)
    assert search_room.fastest([search], 8)[1] == fewer


def test_without_a_link_nothing_is_offloaded():
    assert not any(level.offloads for level in llama_search_without_host().profile.levels)
    assert any(level.offloads for level in llama_search().profile.levels)


def test_a_mix_in_words():
    search = llama_search()
    names = [level.name for level in search.profile.levels]
    none, full = names.index("none"), names.index("full")
    assert search.describe((full,) * 3) == "full"
    assert search.describe((none, full, none)) == "layers:2"
    assert search.describe((full, none, none)) == "blocks 1 full; 2-3 none (of 3)"
