"""The named placement presets: ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hsdp``; ``tp`` with any of them.

A preset says, for each mesh dimension, what is stored where; the walk along a dimension then places
everything else (:mod:`stepgraph.placement.data_parallel`, :mod:`stepgraph.placement.tensor_parallel`).
Dimensions are decided one by one: a strategy that is right on each is right on all.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Replicate, Shard

from stepgraph.errors import MeshError, UsageError, near_misses
from stepgraph.placement.data_parallel import DataParallel, Storage
from stepgraph.placement.tensor_parallel import TensorParallel, find_layout
from stepgraph.placement.walk import REPLICATE, Walk
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision
from stepgraph.program import roles
from stepgraph.program.layout import TENSOR_PARALLEL, MeshShape, Placements
from stepgraph.program.program import OPTIMIZER, Program

_WHOLE, _ZERO3 = Storage(False, False, False), Storage(True, True, True)

PRESETS: dict[str, dict[str, Storage]] = {
    "ddp": {"dp": _WHOLE},
    "zero1": {"dp": Storage(False, True, False)},
    "zero2": {"dp": Storage(False, True, True)},
    "zero3": {"dp": _ZERO3},
    "hsdp": {"replicate": _WHOLE, "shard": _ZERO3},
}


def check_preset(name: str, mesh: MeshShape) -> dict[str, Storage]:
    """What a preset stores where, by data-parallel mesh dimension, if the mesh has what it needs.

    ``tp`` is implied where the mesh has that dimension; ``"tp"`` alone is ``tp+ddp`` on a mesh with ``dp``.

    Raises:
        UsageError: unknown name; the message lists the known ones.
        MeshError: the mesh lacks a dimension, or has one that the preset does not know.
    """
    parts = name.split("+")
    for part in parts:
        if part not in PRESETS and part != TENSOR_PARALLEL:
            raise UsageError(
                f"unknown plan {name!r}", do=near_misses(part, [*PRESETS, TENSOR_PARALLEL])
            )
    data = [part for part in parts if part in PRESETS]
    if len(data) > 1 or len(set(parts)) != len(parts):
        raise UsageError(
            f"plan {name!r} says twice what happens on the data-parallel dimensions",
            do="name one of " + ", ".join(PRESETS) + ", and tp",
        )
    preset = PRESETS[data[0]] if data else {dim: _WHOLE for dim in ("dp",) if dim in mesh.names}
    wanted = [*preset, *(part for part in parts if part == TENSOR_PARALLEL)]
    missing = [dim for dim in wanted if dim not in mesh.names]
    extra = [dim for dim in mesh.names if dim not in preset and dim != TENSOR_PARALLEL]
    if missing or extra:
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)} besides"
        raise MeshError(
            f"preset {name!r} places values on the mesh dimensions "
            f"{' and '.join(map(repr, wanted))}; the mesh {mesh} {problem}",
            do=f"use a mesh such as {','.join(f'{dim}=2' for dim in wanted)}",
        )
    return preset


def stored_parameter(preset_name: str, shape: tuple[int, ...], mesh: MeshShape) -> Placements:
    """Where a parameter of a global shape is stored before the first program says how it is cut."""
    preset = check_preset(preset_name, mesh)
    return tuple(
        Shard(0) if name in preset and preset[name].shard_parameters and shape else REPLICATE
        for name in mesh.names
    )


def decide(
    program: Program,
    mesh: MeshShape,
    preset_name: str,
    parameters: Mapping[str, Placements] | None = None,
) -> PlacementDecision:
    """Places every value of a Program by a preset.

    Args:
        program: with global shapes, not placed yet.
        mesh: has the dimensions that the preset names.
        preset_name: presets of :data:`PRESETS` and ``tp``, joined by ``+``.
        parameters: where another program of the same step stores parameters already.

    Returns:
        the decision, in the model's own names.
    """
    preset = check_preset(preset_name, mesh)
    decision = PlacementDecision(preset_name)
    walks: dict[str, Walk] = {}
    taken: frozenset = frozenset()
    if TENSOR_PARALLEL in mesh.names:
        axis = mesh.names.index(TENSOR_PARALLEL)
        layout = {name: placements[axis] for name, placements in (parameters or {}).items()}
        layout = find_layout(program, mesh.sizes[axis], layout)
        walk = TensorParallel(program, mesh.sizes[axis], layout)
        walks[TENSOR_PARALLEL] = walk.decide()
        taken = _cut_by_rows(walk)
        decision.notes += _kept_whole(walk)
    for name, storage in preset.items():
        size = mesh.sizes[mesh.names.index(name)]
        walks[name] = DataParallel(program, size, mesh.data_size, storage, taken).decide()
    _record(program, [walks[name] for name in mesh.names], decision)
    return decision


def _cut_by_rows(walk: TensorParallel) -> frozenset:
    """Parameters whose rows tensor parallelism cuts, and gradients on their way into the update."""
    names = {name for name, placement in walk.layout.items() if placement == Shard(0)}
    nodes = {
        node
        for node in walk.chosen
        if node.meta["phase"] != OPTIMIZER and walk.now[node] == (Shard(0),)
    }
    return frozenset(names | nodes)


def _kept_whole(walk: TensorParallel) -> list[str]:
    """Says which matrices tensor parallelism does not cut."""
    whole = [
        name
        for name, shape in walk.shapes.items()
        if len(shape) > 1 and isinstance(walk.layout.get(name, REPLICATE), Replicate)
    ]
    if not whole:
        return []
    shown = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
    return [f"tp keeps these weights, and the work on them, whole on every rank: {shown}"]


def _record(program: Program, walks: list[Walk], decision: PlacementDecision) -> None:
    for role in program.inputs:
        decision.inputs[roles.label(role)] = tuple(walk.inputs[role] for walk in walks)
    for role in program.outputs:
        decision.outputs[roles.label(role)] = tuple(walk.outputs[role] for walk in walks)
    for node in walks[0].chosen:
        each = [walk.chosen[node] for walk in walks]
        decision.operations[node.meta["name"]] = OperationPlacement(
            tuple(zip(*(strategy.inputs for strategy in each), strict=True)),
            tuple(
                None if None in placements else tuple(p or REPLICATE for p in placements)
                for placements in zip(*(strategy.outputs for strategy in each), strict=True)
            ),
        )
    for walk in walks:
        decision.unruled |= walk.unruled
