"""What one real step of an engine holds: what predictions of memory are compared with."""

from __future__ import annotations

from typing import Any

import torch

import stepgraph
from stepgraph.runtime.batches import flatten_batch
from stepgraph.runtime.live_memory import LiveMemory


def live_step(engine: stepgraph.Engine, batch: Any) -> LiveMemory:
    """What one more real step of an engine holds, inputs and state included."""
    leaves = flatten_batch(batch, torch.device("cpu"))
    step = engine._programs_of("step", leaves).programs["step"]
    with LiveMemory([*step.held(), *leaves.leaves], away=step.held(away=True)) as live:
        engine.step(batch)
    return live
