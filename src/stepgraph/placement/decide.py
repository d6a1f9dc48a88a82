"""Where every value of a Program lives, by a policy's name: a preset's, or ``auto``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from stepgraph.cost.devices import Device
from stepgraph.placement.batch_dims import find_batch_dims
from stepgraph.placement.presets.named import decide_by_preset
from stepgraph.placement.solver.automatic import decide_automatically
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.planning.plan import AUTO
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
    """Places every value of a Program.

    Args:
        program: with global shapes, not placed yet; it is left as it was.
        policy: as :func:`stepgraph.placement.presets.named.check_preset` takes it.
        known_inputs: where other programs of the step store inputs, by label.
        device, constraints, memory_limit, recomputed: for ``auto``, as
            :func:`stepgraph.placement.solver.automatic.decide_automatically` takes them.

    Returns:
        the decision, in the model's own names.
    """
    if policy == AUTO:
        assert device is not None, "a placement that is to be found is found for a device"
        decision = decide_automatically(
            program, mesh, device, known_inputs, constraints, memory_limit, recomputed
        )
    else:
        decision = decide_by_preset(program, mesh, policy, known_inputs)
    return replace(decision, batch_dims=find_batch_dims(program, decision, mesh))
