"""Small plans with everything in them, made once."""

from __future__ import annotations

import functools

import stepgraph
from stepgraph.planning.plan import Plan
from tests.support import tiny_llama, token_batch


@functools.cache
def llama_plan(mesh: str = "dp=2,tp=2", placement: str = "tp+zero3", memory: str = "full") -> Plan:
    """Of two layers; callers must not change it."""
    return stepgraph.plan(
        tiny_llama(2), example=token_batch(), mesh=mesh, placement=placement, memory=memory
    )
