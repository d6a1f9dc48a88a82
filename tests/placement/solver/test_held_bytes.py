"""Limits: a solver that knows the peak in part is led to the largest solution that fits."""

import pytest

from stepgraph.memory.decide import decide
from stepgraph.placement.solver.held_bytes import Limits, least_bytes, whole_bytes
from tests.placement.planned import TOYS, global_step, place
from tests.placement.solver.test_automatic import chain
from tests.sampling import sampled
from tests.support import adamw


def search(budget, peak_of, least=0.0, first=None):
    """(held by the last solution that fits, solutions) of a solver that holds all it may."""
    limits, limit, fits, tried = Limits(budget), first or 2 * budget, None, 0
    while limit is not None and tried < 6:
        tried += 1
        if limit < least:
            limit = limits.raised_to(least)
            continue
        held, peak = limit, peak_of(limit)
        fits = held if peak <= budget else fits
        limit = limits.after(held, peak)
    return fits, tried


def test_what_fits_at_once_is_kept():
    assert search(100, lambda held: held / 4) == (200, 1)


@pytest.mark.parametrize("part", [0.6, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("beside", [0, 20])
def test_the_budget_is_used_but_for_a_little(part, beside):
    held, _ = search(100, lambda held: int(part * held) + beside)
    assert held is not None and 78 <= int(part * held) + beside <= 100


def test_between_one_that_fits_and_one_that_does_not_the_next_is_where_the_budget_is():
    for peak, part in ((110, 0.95 * 40 / 50), (200, 0.5)):
        limits = Limits(100)
        assert limits.after(140, peak) is not None
        assert limits.after(100, 60) == int(100 + part * 40)


def test_nothing_is_asked_for_that_cannot_be():
    assert search(100, lambda held: held + 30, least=60)[0] >= 60
    assert search(100, lambda held: held + 50, least=80) == (None, 3)


def test_too_small_a_limit_is_raised_once():
    assert search(50, lambda held: held, least=120, first=60)[0] is None
    assert Limits(100).raised_to(0) is None or Limits(100).raised_to(0) == 0


@pytest.mark.parametrize("memory", sampled(["none", "full"]))
def test_no_placement_holds_less_than_what_is_held_at_least(memory):
    model, batch = chain(8, 16, 16, 8)
    program = global_step(model, batch, "dp=2,tp=2", adamw(model))
    recomputed = decide(program, memory).recompute
    stored, kept = whole_bytes(program, recomputed)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert stored >= 3 * parameters and (kept > 0) == (memory == "none")
    planned = place(program, "dp=2,tp=2", TOYS["balanced"], memory=memory)
    held = planned.model.problem.memory(planned.solution.chosen)
    assert least_bytes(program, 4, recomputed) == (stored + kept) // 4 <= held
