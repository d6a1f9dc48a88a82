"""What short steps say leads, of a solver's placements and of presets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepgraph import leading
from stepgraph.contest import predicted
from stepgraph.leading import leader, placed
from stepgraph.pipeline import make
from stepgraph.placement.solver.room import Room
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
