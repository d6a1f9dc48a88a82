"""Small plans with everything in them; the model is captured once."""

from __future__ import annotations

import functools

import torch

from stepgraph.api.planner import Planner
from stepgraph.capture.module import default_loss
from stepgraph.cost.devices import find_device
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import Precision
from stepgraph.runtime.ranks import parse_mesh
from tests.support import adamw, tiny_llama, token_batch


@functools.cache
def _planner() -> Planner:
    model = tiny_llama(2)
    h100, precision = find_device("h100"), Precision(torch.bfloat16)
    return Planner(model, token_batch(), default_loss, adamw(model), h100, precision)


@functools.cache
def llama_plan(placement: str = "tp+zero3", memory: str = "full") -> Plan:
    """Of two layers on ``dp=2,tp=2``; callers must not change it."""
    return _planner().plan(parse_mesh("dp=2,tp=2"), placement, memory, last=False).plan
