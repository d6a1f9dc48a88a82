"""The integer program finds what trying every choice finds."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.placement.solver import optimise
from stepgraph.placement.solver.choices import (
    BACKWARD,
    FORWARD,
    Block,
    Link,
    Problem,
    Reader,
    improve,
    runners_up,
)
from stepgraph.placement.solver.optimise import InfeasibleError, Search, solve

PLACEMENTS = 3
PHASES = ((FORWARD,), (BACKWARD,), (FORWARD, BACKWARD))


def every_choice(problem: Problem):
    return itertools.product(*(range(len(block.cost)) for block in problem.blocks))


def cheapest(problem: Problem) -> float:
    """By trying every choice; infinite where none fits."""
    limit = math.inf if problem.memory_limit is None else problem.memory_limit
    fitting = (chosen for chosen in every_choice(problem) if problem.memory(chosen) <= limit)
    return min(map(problem.cost, fitting), default=math.inf)


def drawn(seed: int, limited: bool = False) -> Problem:
    """Blocks and links of every kind: read by several, in both phases, by their producer, hidden."""
    chance = random.Random(seed)

    def numbers(count: int, high: int) -> np.ndarray:
        return np.array([float(chance.randint(0, high)) for _ in range(count)])

    blocks = []
    for i in range(chance.randint(2, 4)):
        count = chance.randint(1, 3)
        cost = numbers(count, 9)
        memory = numbers(count, 9) if chance.random() < 0.7 else None
        later = np.array(sorted((1.0, chance.random()), reverse=True))
        temporary = numbers(count, 9) if chance.random() < 0.3 else None
        later = later if chance.random() < 0.5 else None
        blocks.append(Block(f"b{i}", cost, memory, later, temporary))

    def placements(block: Block) -> np.ndarray:
        return np.array([chance.randrange(PLACEMENTS) for _ in block.cost])

    links = []
    for i in range(chance.randint(1, 6)):
        producer = chance.choice(blocks)
        readers = [
            Reader(block, placements(block), chance.choice(PHASES))
            for block in (chance.choice(blocks) for _ in range(chance.randint(1, 3)))
        ]
        once, again = np.zeros((2, PLACEMENTS, PLACEMENTS))
        for p, q in itertools.permutations(range(PLACEMENTS), 2):
            kind, cost = chance.random(), float(chance.randint(0, 9))
            if kind < 0.1:
                once[p, q] = np.inf
            if 0.1 < kind < 0.6:  # a change is paid once, or in each phase, or in parts
                once[p, q] = cost
            if kind > 0.5:
                again[p, q] = float(chance.randint(0, 9))
        beside = np.array(sorted((1.0, chance.random()), reverse=True))
        later = beside if chance.random() < 0.3 else None
        sizes = numbers(PLACEMENTS**2, 5).reshape(PLACEMENTS, -1)
        kept = np.where((once > 0) & np.isfinite(once), sizes, 0) if chance.random() < 0.4 else None
        made = placements(producer)
        temporary = (
            numbers(PLACEMENTS**2, 9).reshape(PLACEMENTS, -1) if chance.random() < 0.3 else None
        )
        link = Link(f"l{i}", producer, made, readers, once, again, later, kept, temporary)
        if later is not None:
            # A part runs beside; the rest may be time for what others have running.
            link.once, link.again = once + again, np.zeros_like(again)
            seconds = np.where(np.isfinite(link.once), link.once, 0.0)
            part = chance.choice((0.0, 0.5, 1.0))
            link.runs = part * seconds
            link.hides = (1 - part) * seconds * chance.choice((0, 1))
        links.append(link)
    problem = Problem(blocks, links)
    if limited:
        sizes = sorted(problem.memory(chosen) for chosen in every_choice(problem))
        problem.memory_limit = sizes[len(sizes) // chance.choice((2, 4, 10))]
    return problem


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), limited=st.booleans())
def test_a_solution_costs_what_the_cheapest_of_all_choices_costs(seed, limited):
    problem = drawn(seed, limited)
    best = cheapest(problem)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            solve(problem, goal=0.0)
        return
    solution = solve(problem, goal=0.0)
    assert solution.cost == pytest.approx(best)
    assert solution.cost == pytest.approx(problem.cost(solution.chosen))
    assert solution.bound <= best + 1e-5 * max(1.0, best)
    assert solution.gap <= 1e-5
    if limited:
        assert problem.memory(solution.chosen) <= problem.memory_limit


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), limited=st.booleans())
def test_no_other_option_of_one_block_is_cheaper_than_what_was_chosen(seed, limited):
    """Counted as the whole counts, with what runs beside other work; and what is named fits."""
    problem = drawn(seed, limited)
    try:
        chosen = solve(problem, goal=0.5, enough=0.5).chosen
    except InfeasibleError:
        return
    for number, (own, other, its_cost) in enumerate(runners_up(problem, chosen)):
        assert its_cost >= own
        if other is not None:
            instead = [*chosen[:number], other, *chosen[number + 1 :]]
            assert problem.fits(instead)
            more = problem.cost(instead) - problem.cost(chosen)
            assert its_cost - own == pytest.approx(max(0.0, more), abs=1e-6)


def test_branches_of_the_relaxation_suffice_where_a_limit_divides_it(monkeypatch):
    """What is cheap is large, and the relaxation takes a part of it: no rounding is the best choice."""
    chance = random.Random(0)
    blocks = []
    for i in range(8):
        sizes = np.array([float(chance.randint(1, 20)) for _ in range(3)])
        blocks.append(Block(f"b{i}", 1 + 40 / sizes, sizes))
    problem = Problem(blocks, [], memory_limit=61.0)
    monkeypatch.setattr(Search, "_cut", None)
    solution = solve(problem, goal=1e-6)
    assert solution.gap <= 1e-6
    assert solution.cost == pytest.approx(cheapest(problem))
    fastest = [int(block.cost.argmin()) for block in blocks]
    assert not problem.fits(fastest) and problem.fits(solution.chosen)


@pytest.mark.parametrize("seed", range(10))
def test_a_goal_is_kept_and_its_bound_holds(seed):
    problem = drawn(seed)
    best = cheapest(problem)
    if math.isinf(best):
        return
    solution = solve(problem, goal=0.2)
    assert solution.gap <= 0.2 + 1e-6
    assert solution.bound <= best + 1e-5 <= solution.cost + 2e-5


@pytest.mark.parametrize("seed", range(12))
def test_what_takes_the_simplex_too_long_is_solved_from_an_interior_point(seed, monkeypatch):
    problem = drawn(seed, limited=True)
    best = cheapest(problem)
    monkeypatch.setattr(optimise, "_STEPS", 0)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            solve(problem, goal=0.0)
    else:
        assert solve(problem, goal=0.0).cost == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_one_problem_has_one_answer(seed):
    if math.isinf(cheapest(drawn(seed))):
        return
    first, second = (solve(drawn(seed), goal=0.0) for _ in range(2))
    assert first == second


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), order=st.lists(st.tuples(st.integers(0, 9), st.booleans())))
def test_limit_after_limit_each_has_the_answer_that_it_has_alone(seed, order):
    """Whatever was solved before: looser, tighter, infeasible, or as an estimate."""
    problem = drawn(seed)
    sizes = sorted({problem.memory(chosen) for chosen in every_choice(problem)})
    search = Search(replace(problem, memory_limit=sizes[-1]), goal=0.0)
    for part, hasty in order:
        limit = sizes[len(sizes) * part // 10] - (part == 0) * 0.5
        best = cheapest(replace(problem, memory_limit=limit))
        if hasty:
            with contextlib.suppress(InfeasibleError):
                search.within(limit, 60.0, hasty=True)
        elif math.isinf(best):
            with pytest.raises(InfeasibleError):
                search.within(limit, 60.0)
        else:
            assert search.within(limit, 60.0).cost == pytest.approx(best)


def test_what_would_fit_is_not_looked_for_where_it_is_not_asked(monkeypatch):
    problem = Problem([Block("block", np.ones(1), np.array([120.0]))], [], memory_limit=100.0)
    monkeypatch.setattr(Search, "_least_memory", None)
    with pytest.raises(InfeasibleError) as caught:
        Search(problem).within(100.0, 60.0, says_least=False)
    assert caught.value.least == 100.0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_what_is_not_feasible_says_the_least_that_is(seed):
    problem = drawn(seed)
    fitting = [c for c in every_choice(problem) if math.isfinite(problem.cost(c))]
    least = min((problem.memory(chosen) for chosen in fitting), default=0.0)
    if least < 1:
        return
    problem.memory_limit = least - 0.5
    with pytest.raises(InfeasibleError) as caught:
        solve(problem)
    assert problem.memory_limit < caught.value.least <= least + 1e-5
    problem.memory_limit = least
    assert problem.memory(solve(problem).chosen) <= least


@pytest.mark.parametrize(
    "more, fast, taken",
    [(0.05, 1.0, 0), (0.05, 9.9, 1), (0.2, 1.0, 1)],
    ids=["much shorter", "hardly shorter", "far too large"],
)
def test_a_limit_that_is_an_estimate_is_exceeded_where_that_pays(more, fast, taken):
    """By a tenth at most; one that holds is not."""
    block = Block("block", np.array([fast, 10.0]), np.array([100 * (1 + more), 90.0]))
    problem = Problem([block, Block("rest", np.ones(1))], [], memory_limit=100.0)
    assert solve(problem).chosen == [1, 0]
    assert solve(problem, hasty=True).chosen == [taken, 0]
    assert problem.memory_limit == 100.0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_what_exceeds_an_estimate_does_so_by_a_tenth_and_is_cheaper(seed):
    problem = drawn(seed, limited=True)
    if math.isinf(best := cheapest(problem)):
        return
    solution = solve(problem, hasty=True)
    held, limit = problem.memory(solution.chosen), problem.memory_limit
    assert held <= limit * 1.1 * (1 + 1e-6)
    roomy = replace(problem, memory_limit=max(held, limit))
    assert solution.bound <= cheapest(roomy) + 1e-5
    if held > limit * (1 + 1e-6):
        assert solution.bound < best


def test_what_no_tenth_more_suffices_for_says_the_least_that_is():
    problem = Problem([Block("block", np.ones(1), np.array([120.0]))], [], memory_limit=100.0)
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, hasty=True)
    assert caught.value.least == pytest.approx(120.0)


def test_a_change_is_paid_once_however_many_want_it():
    """Three readers in each phase; one price is paid once, the other once in each phase."""
    producer = Block("producer", np.zeros(1))
    readers = [Block(f"r{i}", np.zeros(1)) for i in range(6)]
    wants = [Reader(b, np.array([1]), (i % 2,)) for i, b in enumerate(readers)]
    price, free = np.array([[0.0, 5.0], [0.0, 0.0]]), np.zeros((2, 2))

    def cost(once, again):
        link = Link("value", producer, np.array([0]), wants, once, again)
        return solve(Problem([producer, *readers], [link])).cost

    assert cost(price, free) == pytest.approx(5)
    assert cost(free, price) == pytest.approx(10)
    assert cost(price, price) == pytest.approx(15)


def test_reductions_hide_behind_work():
    """Only what is longer than the work behind which it runs makes the step longer."""
    work = Block("work", np.array([3.0]), later=np.array([1.0, 0.0]))
    stored = Block("stored", np.zeros(1))
    once = np.array([[0.0, 4.0], [0.0, 0.0]])
    link = Link(
        "gradient", work, np.array([0]), [Reader(stored, np.array([1]), (BACKWARD,))], once,
        np.zeros((2, 2)), later=np.array([1.0, 0.0]), runs=once, hides=0 * once,
    )  # fmt: skip
    assert solve(Problem([work, stored], [link])).cost == pytest.approx(3 + 1)
    link.later = np.array([1.0, 1.0])  # it begins when all work is done
    assert solve(Problem([work, stored], [link])).cost == pytest.approx(3 + 4)
    link.later = None
    assert solve(Problem([work, stored], [link])).cost == pytest.approx(3 + 4)


def test_waiting_for_one_wire_lets_another_run():
    """Waiting inside a node hides as much of a reduction between nodes; on its own wires, nothing."""
    work, stored = Block("work", np.array([3.0]), later=np.zeros(1)), Block("stored", np.zeros(1))
    readers = [Reader(stored, np.array([1]), (BACKWARD,))]

    def link(name, seconds, runs, hides):
        once = np.array([[0.0, seconds], [0.0, 0.0]])
        tables = {"runs": runs * once, "hides": hides * once}
        return Link(name, work, np.array([0]), readers, once, 0 * once, np.ones(1), **tables)

    gradient = link("gradient", 5.0, runs=1, hides=0)
    for other, expected in ((1, 3 + 2 + 3), (0, 3 + 2 + 5)):
        activation = link("activation", 2.0, runs=0, hides=other)
        problem = Problem([work, stored], [gradient, activation])
        assert solve(problem).cost == pytest.approx(expected)


def test_where_one_of_two_has_room_it_is_the_one_that_is_hidden_better():
    """Neither can be moved alone: both would not fit, or would take longer; what reads them follows."""
    index, none = np.arange(2), np.zeros((3, 3))
    weights = [Block(name, np.zeros(2), np.array([4.0, 1.0])) for name in ("early", "late")]
    readers = [Block(f"reads {weight.name}", np.zeros(2)) for weight in weights]
    gradients = [Block(f"gradient of {weight.name}", np.zeros(1)) for weight in weights]
    links = []
    for weight, reader, gradient, hidden in zip(
        weights, readers, gradients, (1.0, 0.999), strict=True
    ):
        change, reduced, runs = none.copy(), none.copy(), none.copy()
        change[[0, 1], [1, 0]], reduced[2, :2], runs[2, 0] = 5.0, 4.0, 4.0 * hidden
        links += [
            Link("read", weight, index, [Reader(reader, index)], change, none),
            Link(
                "reduced", gradient, np.array([2]), [Reader(weight, index, (BACKWARD,))], reduced,
                none, later=np.zeros(1), runs=runs, hides=none,
            ),
        ]  # fmt: skip
    problem = Problem([*weights, *readers, *gradients], links, memory_limit=5.0)
    assert improve(problem, [1, 0, 1, 0, 0, 0]) == [0, 1, 0, 1, 0, 0]


def test_what_is_exchanged_may_be_impossible_until_what_reads_it_follows():
    only, weights = np.where(np.eye(3) > 0, 0.0, np.inf), []
    for name in "ab":
        weights.append(Block(name, np.zeros(3), np.array([4.0, 1.0, 1.0])))
    readers = [Block("of a", np.array([1.0, 0, 5])), Block("of b", np.array([0.0, 9, 9]))]
    links = [
        Link("read", weight, np.arange(3), [Reader(reader, np.arange(3))], only, 0 * np.eye(3))
        for weight, reader in zip(weights, readers, strict=True)
    ]
    problem = Problem([*weights, *readers], links, memory_limit=5.0)
    assert improve(problem, [0, 1, 0, 1]) == [1, 0, 1, 0]


def test_the_scale_of_costs_does_not_matter():
    """Microseconds, or weeks: an answer is as exact."""
    for factor in (1e-9, 1e6):
        problem = drawn(6)
        best = cheapest(problem)
        assert math.isfinite(best)
        for block in problem.blocks:
            block.cost = block.cost * factor
        for link in problem.links:
            link.once, link.again = link.once * factor, link.again * factor
            if link.runs is not None and link.hides is not None:
                link.runs, link.hides = link.runs * factor, link.hides * factor
        assert solve(problem, goal=0.0).cost == pytest.approx(best * factor)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_runners_up_are_the_next_best_of_each_block_alone(seed):
    problem = drawn(seed)
    for link in problem.links:  # what hides is shared by all blocks
        link.later = None
    if math.isinf(cheapest(problem)):
        return
    solution = solve(problem, goal=0.0)
    for i, (cost, other, its_cost) in enumerate(runners_up(problem, solution.chosen)):
        block, chosen = problem.blocks[i], list(solution.chosen)
        costs = {
            o: problem.cost([*chosen[:i], o, *chosen[i + 1 :]]) for o in range(len(block.cost))
        }
        del costs[chosen[i]]
        least = min(costs.values(), default=math.inf)
        if other is None:
            assert math.isinf(least)
            continue
        assert costs[other] == pytest.approx(least)
        assert its_cost - cost == pytest.approx(costs[other] - solution.cost)
