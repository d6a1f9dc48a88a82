"""Constraints of ``auto``: what they pin, and what is said of those that name nothing or cannot be had."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.errors import UsageError
from tests.placement.planned import TOYS, global_step, place

MESH = "dp=2,tp=2"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16, bias=False), nn.Linear(16, 6, bias=False)

    def forward(self, x, y):
        return (self.two(torch.relu(self.one(x))) - y).square().mean()


@pytest.fixture(scope="module")
def program():
    return global_step(Net(), (torch.randn(8, 8), torch.randn(8, 6)), MESH)


def planned(program, constraints):
    return place(program.copy(), MESH, TOYS["balanced"], constraints)


def test_parameters_inputs_and_results_are_placed_as_asked(program):
    asked = {"*.weight": "RS(1)", "input:0": "RR", "one/output": "S(0)S(1)"}
    found = planned(program, asked)
    assert set(found.stored.values()) == {(Replicate(), Shard(1))}
    decision = found.plan.decisions["step"].placement
    batch = [p for label, p in decision.inputs.items() if label.startswith("UserInput")]
    assert batch[0] == (Replicate(), Replicate())
    assert (Shard(0), Shard(1)) in decision.operations["one/mm"].outputs
    free = planned(program, {})
    assert found.solution.cost >= free.solution.cost


def test_an_input_may_come_as_a_sum_over_ranks(program):
    found = planned(program, {"input:0": "P(sum)R"})
    decision = found.plan.decisions["step"].placement
    batch = [p for label, p in decision.inputs.items() if label.startswith("UserInput")]
    assert batch[0] == (Partial("sum"), Replicate())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"one.weigth": "RR"}, "one.weight"),
        ({"tow/output": "RR"}, "two/output"),
        ({"input:z": "RR"}, "input:0"),
        ({"dp": "zero33"}, "zero3"),
        ({"tp": "tp+s"}, "tp\\+sp"),
        ({"tp": "zero3"}, "no preset for this mesh dimension"),
        ({"one.weight": "R"}, "has 1 placements"),
        ({"one.weight": "RRR"}, "has 3 placements"),
        ({"one.weight": "RQ"}, "are no placements"),
        ({"one.weight": ""}, "placements"),
        ({"two.weight": "S(0)S(0)"}, "cannot be placed S\\(0\\)S\\(0\\)"),
        ({"one.weight": "RS(2)"}, "cannot be placed RS\\(2\\)"),
        ({"input:0": "S(0)S(3)"}, "cannot be placed"),
        ({"one/output": "S(5)R"}, "cannot be placed"),
        ({"one/output": "P(max)R"}, "satisfies all constraints"),
        ({"two.weight": "S(0)R", "tp": "tp", "*.weight": "S(1)S(1)"}, "satisfies all constraints"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_said(program, asked, message):
    with pytest.raises(UsageError, match=message):
        planned(program, asked)
