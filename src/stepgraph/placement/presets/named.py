"""The named placement presets: ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hsdp``; ``tp``, ``sp`` with any.

``zero3-keep`` is ``zero3`` that keeps gathered parameters for the backward.
A preset says, for each mesh dimension, what is stored where; the walk along a dimension then places
everything else (:mod:`stepgraph.placement.presets.data_parallel`,
:mod:`stepgraph.placement.presets.tensor_parallel`).
Dimensions are decided one by one: a strategy that is right on each is right on all.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from stepgraph.errors import MeshError, UsageError, name_a_few, near_misses
from stepgraph.placement.presets.data_parallel import DataParallel, Storage
from stepgraph.placement.presets.tensor_parallel import TensorParallel, find_layout
from stepgraph.placement.presets.walk import REPLICATE, Walk
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision
from stepgraph.planning.plan import AUTO
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements
from stepgraph.program.mesh_roles import Role
from stepgraph.program.program import OPTIMIZER, Program

_WHOLE, _ZERO3 = Storage(False, False, False), Storage(True, True, True)

TENSOR_PARALLEL, SEQUENCE_PARALLEL = "tp", "sp"

PRESETS: dict[str, dict[Role, Storage]] = {
    "ddp": {Role.DATA: _WHOLE},
    "zero1": {Role.DATA: Storage(False, True, False)},
    "zero2": {Role.DATA: Storage(False, True, True)},
    "zero3": {Role.DATA: _ZERO3},
    "zero3-keep": {Role.DATA: Storage(True, True, True, gather_again=False)},
    "hsdp": {Role.REPLICATE: _WHOLE, Role.SHARD: _ZERO3},
}


def check_preset(name: str, mesh: MeshShape) -> dict[str, Storage]:
    """What a preset stores where, by mesh dimension that divides the batch, if the mesh has what it needs.

    ``tp`` is implied where the mesh has that dimension; ``"tp"`` alone is ``tp+ddp`` on a mesh with ``dp``;
    ``sp`` needs ``tp``. ``auto`` fits every mesh, and says nothing beforehand.

    Raises:
        UsageError: unknown name; the message lists the known ones.
        MeshError: the mesh lacks a dimension, or has one that the preset does not know.
    """
    if name == AUTO:
        return {}
    parts = name.split("+")
    known = [*PRESETS, TENSOR_PARALLEL, SEQUENCE_PARALLEL, AUTO]
    for part in parts:
        if part not in known:
            raise UsageError(f"unknown plan {name!r}", do=near_misses(part, known))
    data = [part for part in parts if part in PRESETS]
    if len(data) > 1 or len(set(parts)) != len(parts):
        raise UsageError(
            f"plan {name!r} says twice what happens on the data-parallel dimensions",
            do="name one of " + ", ".join(PRESETS) + ", and tp or tp+sp",
        )
    preset = PRESETS[data[0]] if data else {r: _WHOLE for r in mesh.roles if r is Role.DATA}
    uses_tensor = TENSOR_PARALLEL in parts or SEQUENCE_PARALLEL in parts
    wanted = [role.dim for role in (*preset, *([Role.TENSOR] if uses_tensor else []))]
    missing = [dim for dim in wanted if dim not in mesh.names]
    extra = [role.dim for role in mesh.roles if role not in preset and role is not Role.TENSOR]
    if missing or extra:
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)} besides"
        raise MeshError(
            f"preset {name!r} places values on the mesh dimensions "
            f"{' and '.join(map(repr, wanted))}; the mesh {mesh} {problem}",
            do=f"use a mesh such as {','.join(f'{dim}=2' for dim in wanted)}",
        )
    return {role.dim: storage for role, storage in preset.items()}


def gathers_again(name: str, mesh: MeshShape) -> bool:
    """Whether parameters that the forward gathered are gathered again for the backward."""
    return all(storage.gather_again for storage in check_preset(name, mesh).values())


def for_own_update(name: str) -> str:
    """The preset for an optimizer outside the program: ``zero1`` and ``zero2`` store parameters sharded."""
    kept = {"zero1": "zero3-keep", "zero2": "zero3-keep"}
    return "+".join(kept.get(part, part) for part in name.split("+"))


def stored_parameter(preset_name: str, shape: tuple[int, ...], mesh: MeshShape) -> Placements:
    """Where a parameter of a global shape is stored before the first program says how it is cut."""
    preset = check_preset(preset_name, mesh)
    cut = {name for name, storage in preset.items() if storage.shard_parameters}
    if preset_name == AUTO:
        cut = {role.dim for role in mesh.roles if role.divides_batch}
    return tuple(Shard(0) if name in cut and shape else REPLICATE for name in mesh.names)


def decide_by_preset(
    program: Program,
    mesh: MeshShape,
    preset_name: str,
    known: Mapping[str, Placements] | None = None,
) -> PlacementDecision:
    """Places every value of a Program by a preset.

    Args:
        program: with global shapes, not placed yet.
        mesh: has the dimensions that the preset names.
        preset_name: presets of :data:`PRESETS` and ``tp``, joined by ``+``.
        known: where another program of the same step stores inputs already, by label.

    Returns:
        the decision, in the model's own names.
    """
    preset = check_preset(preset_name, mesh)
    decision = PlacementDecision(preset_name)
    walks: dict[str, Walk] = {}
    taken: frozenset = frozenset()
    if (axis := mesh.axis_of(Role.TENSOR)) is not None:
        params = (role for role in program.inputs if isinstance(role, roles.Param))
        stored = {role.name: (known or {}).get(roles.label(role)) for role in params}
        layout = {name: placed[axis] for name, placed in stored.items() if placed is not None}
        ranks = mesh.sizes[axis]
        layout = find_layout(program, ranks, mesh.data_size, layout)
        sequence = None
        if SEQUENCE_PARALLEL in preset_name.split("+"):
            sequence = _sequence_dims(program)
        walk = TensorParallel(program, ranks, mesh.data_size, layout, sequence)
        walks[mesh.names[axis]] = walk.decide()
        taken = _cut_by_rows(walk)
        decision.notes += _kept_whole(walk)
        if sequence is not None and not _cuts_the_sequence(walk):
            decision.notes.append("sp: no activation of this model could be cut along its sequence")
    for name, storage in preset.items():
        size = mesh.sizes[mesh.names.index(name)]
        walks[name] = DataParallel(program, size, mesh.data_size, storage, taken).decide()
    record(program, [walks[name] for name in mesh.names], decision)
    return decision


def walk_along(
    program: Program, mesh: MeshShape, axis: int, preset_name: str, tensor: Walk | None = None
) -> Walk:
    """What a preset does along one mesh dimension.

    Args:
        preset_name: of a data-parallel dimension, or ``tp`` with or without ``sp``.
        tensor: the walk along the dimension of tensor parallelism, where that is a preset's too.
    """
    size = mesh.sizes[axis]
    if mesh.roles[axis] is not Role.TENSOR:
        (storage,) = PRESETS[preset_name].values()
        taken = _cut_by_rows(tensor) if isinstance(tensor, TensorParallel) else frozenset()
        return DataParallel(program, size, mesh.data_size, storage, taken).decide()
    layout = find_layout(program, size, mesh.data_size, {})
    sequence = _sequence_dims(program) if SEQUENCE_PARALLEL in preset_name.split("+") else None
    return TensorParallel(program, size, mesh.data_size, layout, sequence).decide()


def ranks_that_divide(program: Program) -> int:
    """The fewest ranks that divide the rows of a batch; 1: it has one row, and none do."""
    rows = [
        value.shape[0]
        for role, value in zip(program.inputs, program.input_values, strict=True)
        if isinstance(role, roles.UserInput) and value.shape
    ]
    usual = statistics.mode(rows) if rows else 1
    return next((ranks for ranks in range(2, usual + 1) if usual % ranks == 0), 1)


def _sequence_dims(program: Program) -> dict[fx.Node, int]:
    """The dimension of (batch, sequence, width) activations, in either order, that is the sequence.

    A data-parallel walk tells where the batch is.
    """
    ranks = ranks_that_divide(program)
    walk = DataParallel(program, ranks, ranks, _WHOLE).decide()
    found = {}
    for node, placements in walk.now.items():
        value, placement = node.meta["val"], placements[0]
        batched = isinstance(placement, Shard) and isinstance(value, torch.Tensor)
        if (
            batched
            and value.dim() == 3
            and placement.dim < 2
            and value.shape[1 - placement.dim] > 1
        ):
            found[node] = 1 - placement.dim
    return found


def _cuts_the_sequence(walk: TensorParallel) -> bool:
    return any(walk.now[node] == (Shard(dim),) for node, dim in walk.sequence.items())


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
    shown = name_a_few(whole)
    return [f"tp keeps these weights, and the work on them, whole on every rank: {shown}"]


def record(program: Program, walks: Sequence[Walk], decision: PlacementDecision) -> None:
    """Writes what walks along all mesh dimensions, in mesh order, have placed into a decision."""
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
