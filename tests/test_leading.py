"""What short steps say leads, of a solver's placements and of presets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stepgraph import leading
from stepgraph.contest import Foreseen, predicted
from stepgraph.cost.short_steps import Said
from stepgraph.errors import BudgetError
from stepgraph.leading import leader, placed
from stepgraph.pipeline import make
from stepgraph.placement.solver.room import Room
from stepgraph.runtime.ranks import parse_mesh
from tests.sampling import sampled
from tests.support import tower
from tests.test_contest import contest_of, planner_of


class Wide(nn.Module):
    """Layers whose collectives are too large to be merged with those of others."""

    def __init__(self, width, layers=8):
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
                for _ in range(layers)
            )
        )

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize(
    ("width", "rows", "name"), sampled([(4096, 65536, "auto"), (8192, 4096, "ddp")])
)
def test_what_leads_is_placed_and_foreseen_and_nothing_of_it_is_made(
    monkeypatch, width, rows, name
):
    monkeypatch.setattr(leading, "MANY", 0)
    with torch.device("meta"):
        planner = planner_of(Wide(width), torch.empty(rows, width), device="h100")
    contest, _, names = contest_of(planner, "dp=4")
    own, best = leader(contest, Room())
    assert best is not None and best.name == name and name in {"auto", *names}
    plan = best.made.plan
    assert all(one.memory is None for one in plan.decisions.values()) and not best.made.programs
    assert plan.decisions.keys() == own.decisions.keys()
    whole = predicted(make(contest.programs, plan, contest.target), contest.device)
    assert best.predicted.step_ms == pytest.approx(whole.step_ms, rel=0.01)
    assert best.predicted.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)


def test_nothing_is_said_of_a_step_that_is_not_deep():
    contest, _, _ = contest_of(planner_of(*tower(2)), "dp=2")
    own, best = leader(contest, Room())
    assert best is None and own.decisions.keys() == contest.programs.keys()
    assert own == placed(contest.programs, contest.plan)


@pytest.mark.parametrize(
    ("step_ms", "peak", "least_ms", "exact", "name"),
    [
        (0.995, 1.1, 0.993, False, "auto"),
        (0.995, 0.9, 0.993, False, "ddp"),
        (0.995, 1.1, 0.995, True, "ddp"),
        (1.001, 0.9, 0.999, False, "auto"),
        (1.02, 0.9, 0.995, False, "auto"),
        (1.02, 0.9, 0.9, False, None),
    ],
    ids=["about_as_fast", "leaner_too", "sure", "own_leads", "own_surely", "may_be_faster"],
)
def test_of_what_cannot_be_told_apart_the_solvers_answer_leads_where_it_holds_less(
    step_ms, peak, least_ms, exact, name
):
    """A preset as a multiple of the solver's answer."""
    planner = planner_of(Wide(16), torch.ones(8, 16), device="h100")
    contest, own, _ = contest_of(planner, "dp=4")
    one = replace(own.predicted, step_ms=1000.0, peak_bytes=1e6)
    other = replace(one, step_ms=1000 * step_ms, peak_bytes=1e6 * peak)
    preset = Foreseen("ddp", Said(other, 1000 * least_ms, exact))
    plan = placed(contest.programs, contest.plan)
    best = leading._leads(plan, Said(one, 1000.0, True), [preset], contest)
    assert (best and best.name) == name
    if best is not None:
        assert best.made.plan.decisions.keys() == plan.decisions.keys()


def test_what_leads_and_does_not_fit_is_not_made_either(monkeypatch):
    monkeypatch.setattr(leading, "MANY", 0)
    made = []

    def noted(programs, plan, *args, **kwargs):
        made.append(plan.memory)
        return make(programs, plan, *args, **kwargs)

    monkeypatch.setattr("stepgraph.api.planner.make", noted)
    with torch.device("meta"):
        planner = planner_of(Wide(4096), torch.empty(65536, 4096), device="h100")
    whole = planner.plan(parse_mesh("dp=4"), "auto", "full")
    made.clear()
    with pytest.raises(BudgetError) as found:
        planner.plan(parse_mesh("dp=4"), "auto", memory_budget=whole.peak // 8)
    assert "full" not in made and "auto" in made
    assert (found.value.smallest or 0) > whole.peak // 8
