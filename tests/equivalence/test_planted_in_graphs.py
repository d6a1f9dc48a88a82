"""A bug that is planted in a pass of the road graph by graph is found on two real ranks, and named."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.equivalence.graph_by_graph import check_graphs
from stepgraph.runtime.batches import flatten_batch
from tests.equivalence.planted import PLANTED_IN_GRAPHS
from tests.equivalence.test_planted import GRAPH_BY_GRAPH

# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)
PLANS = ("ddp", "zero3")


class Broken(nn.Module):
    """Dropout, a graph break, a loss over a count; rows that do not divide over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3, bias=False)

    def forward(self, x, y):
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        torch._dynamo.graph_break()
        h = torch.tanh(self.second(h))
        weight = (y > 0).float()
        each = nn.functional.cross_entropy(self.last(h), y, reduction="none")
        return (each * weight).sum() / weight.sum()


def plan_of(name: str) -> str:
    """The plan whose programs a pass changes, and its bug with it."""
    gathers = ("merge_small_collectives", "place_markers", "delay_waits")
    return "zero3" if name in gathers else "ddp"


def run() -> dict[str, dict[str, str | None]]:
    """By plan and planted pass ("" for none): the first pass that differs."""
    found: dict[str, dict[str, str | None]] = {}
    for plan in PLANS:
        torch.manual_seed(0)
        model = Broken()
        random = torch.Generator().manual_seed(int(os.environ["RANK"]))
        batch = (torch.randn(6, 6, generator=random), torch.randint(0, 3, (6,), generator=random))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = stepgraph.Engine(model, optimizer=optimizer, plan=plan, lowering="eager")
        report = stepgraph.check(engine, batch)
        found[plan] = {"": report.first_difference, "graphs": str(len(report.passes))}
        runner = engine.graph_by_graph()
        planted = {n: bug for n, bug in PLANTED_IN_GRAPHS.items() if plan_of(n) == plan}
        for name, bug in planted.items():
            local = flatten_batch(batch, torch.device("cpu"))
            found[plan][name] = check_graphs(runner, local, {name: bug}).first_difference
    return found


@pytest.fixture(scope="module")
def found():
    return launch(run, ranks=2)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_without_a_bug_all_passes_of_both_graphs_agree(found, plan):
    assert found[plan][""] is None and int(found[plan]["graphs"]) > 20


def test_every_pass_of_that_road_alone_has_a_planted_bug():
    assert PLANTED_IN_GRAPHS.keys() >= GRAPH_BY_GRAPH


@pytest.mark.parametrize("name", PLANTED_IN_GRAPHS)
def test_a_planted_bug_is_found_where_it_is(found, name):
    found = found[plan_of(name)]
    assert found[name] == name, found
