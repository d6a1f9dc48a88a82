"""Limits: a solver that knows the peak in part is led to the largest solution that fits."""

import pytest

from stepgraph.placement.solver.held_bytes import Limits


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


def test_nothing_is_asked_for_that_cannot_be():
    assert search(100, lambda held: held + 30, least=60)[0] >= 60
    assert search(100, lambda held: held + 50, least=80) == (None, 3)


def test_too_small_a_limit_is_raised_once():
    assert search(50, lambda held: held, least=120, first=60)[0] is None
    assert Limits(100).raised_to(0) is None or Limits(100).raised_to(0) == 0
