"""What short steps say leads, of a solver's placements and of presets."""

from __future__ import annotations

import pytest

from stepgraph import leading
from stepgraph.leading import leader, placed
from tests.support import tower
from tests.test_contest import contest_of, planner_of


def test_what_leads_is_placed_and_foreseen_and_nothing_of_it_is_made(monkeypatch):
    monkeypatch.setattr(leading, "MANY", 0)
    planner = planner_of(*tower(8), device="h100")
    contest, _, names = contest_of(planner, "dp=4")
    own, best = leader(contest, None)
    assert all(one.memory is None for one in own.decisions.values())
    if best is None:  # presets whose short steps have one collective for all layers may be better
        pytest.skip("short steps do not say")
    assert best.name in {"auto", *names} and not best.made.programs
    decided = best.made.plan.decisions
    assert decided.keys() == own.decisions.keys()
    name = "none" if best.name == "auto" else best.name
    if name in names:
        whole = planner.plan(contest.plan.mesh, name, "none").plan.predicted
        assert best.predicted.step_ms == pytest.approx(whole.step_ms, rel=0.03)


def test_nothing_is_said_of_a_step_that_is_not_deep():
    contest, _, _ = contest_of(planner_of(*tower(2)), "dp=2")
    own, best = leader(contest, None)
    assert best is None and own.decisions.keys() == contest.programs.keys()
    assert own == placed(contest.programs, contest.plan)
