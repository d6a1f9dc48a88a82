"""Small plans with everything in them; the model is captured once."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from stepgraph.api.plan import Plan, public
from stepgraph.api.planner import Planner
from stepgraph.capture.module import default_loss
from stepgraph.cost.devices import find_device
from stepgraph.planning.decisions import PlacementDecision, Reason
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.runtime.ranks import parse_mesh
from tests.support import adamw, tiny_llama, token_batch


@functools.cache
def _planner() -> Planner:
    model = tiny_llama(2)
    step = StepSettings("adamw", precision=Precision(torch.bfloat16))
    return Planner(model, token_batch(), default_loss, adamw(model), find_device("h100"), step)


@functools.cache
def llama_plan(placement: str = "tp+zero3", memory: str = "full") -> Plan:
    """Of two layers on ``dp=2,tp=2``."""
    return public(_planner().plan(parse_mesh("dp=2,tp=2"), placement, memory).plan)


def placed_otherwise(plan: Plan, key: str = "step", **fields: Any) -> Plan:
    """The plan with other fields in one program's placement decision."""
    decided = plan.decisions[key]
    found: PlacementDecision = replace(decided.placement, **fields)
    return plan.with_decisions(key, replace(decided, placement=found))


def with_reason(plan: Plan, name: str, reason: Reason) -> Plan:
    """The plan with a solver's reason for one value of the step."""
    return placed_otherwise(
        plan, reasons={**plan.decisions["step"].placement.reasons, name: reason}
    )
