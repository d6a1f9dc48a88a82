"""Decides where every value of a Program lives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from stepgraph.cost.devices import Device
from stepgraph.placement.batch_dims import find_batch_dims
from stepgraph.placement.presets.named import check_preset, decide_by_preset
from stepgraph.placement.solver.automatic import decide_automatically
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.planning.request import AUTO
from stepgraph.program.layout import MeshShape, Placements
from stepgraph.program.program import Program


def decide(
    program: Program,
    mesh: MeshShape,
    policy: str,
    *,
    known_inputs: Mapping[str, Placements],
    device: Device | None = None,
    constraints: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    recomputed: Collection[str] = (),
) -> PlacementDecision:
    """Where every value of a global Program lives; it stays as it is.

    Args:
        program: in the form that :func:`wants_views_apart` asks for.
        policy: a preset, or ``auto``.
        known_inputs: where other programs of the step store inputs, by label.
        device: whose costs count, for ``auto``.
        constraints, memory_limit, recomputed: of :func:`decide_automatically`.
    """
    if policy != AUTO:
        decision = decide_by_preset(program, mesh, policy, known_inputs)
    else:
        assert device is not None, "a plan that is to be found says for which device"
        decision = decide_automatically(
            program, mesh, device, known_inputs, constraints, memory_limit, recomputed
        )
    return replace(decision, batch_dims=find_batch_dims(program, decision, mesh))


def wants_views_apart(policy: str) -> bool:
    """Whether each reader of a view has to have one of its own: a solver moves what is viewed."""
    return policy == AUTO


def reduces_each_micro_batch(policy: str, mesh: MeshShape) -> bool:
    """Whether gradients are reduced for every micro-batch, because accumulators are sharded."""
    return any(storage.accumulate_sharded for storage in check_preset(policy, mesh).values())
