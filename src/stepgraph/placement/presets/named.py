"""The named placement presets: ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hsdp``; ``tp``, ``sp`` with any.

``zero3-keep`` is ``zero3`` that keeps gathered parameters for the backward.
A preset says, for each mesh dimension, what is stored where; the walk along a dimension then places
everything else (:mod:`stepgraph.placement.presets.data_parallel`,
:mod:`stepgraph.placement.presets.tensor_parallel`).
Dimensions are decided one by one: a strategy that is right on each is right on all.
"""

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Shard

from stepgraph.errors import MeshError, UsageError, near_misses
from stepgraph.placement.presets.beside_data import BESIDE_DATA
from stepgraph.placement.presets.data_parallel import PRESETS, WHOLE, Storage, walk_data_parallel
from stepgraph.placement.presets.walk import REPLICATE, Walk
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision, PlacementDraft
from stepgraph.planning.request import AUTO
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements
from stepgraph.program.mesh_roles import Role
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program

NOTHING_KNOWN: Mapping[str, Placements] = {}
# Walks of one Program, with their notes, that presets have in common: by mesh dimension and what is asked.
SharedWalks = dict[tuple, tuple[Walk, list[str]]]


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
    asks_for = {word: role for role, kind in BESIDE_DATA.items() for word in kind.words}
    known = [*PRESETS, *asks_for, AUTO]
    for part in parts:
        if part not in known:
            raise UsageError(f"unknown plan {name!r}", do=near_misses(part, known))
    data = [part for part in parts if part in PRESETS]
    if len(data) > 1 or len(set(parts)) != len(parts):
        raise UsageError(
            f"plan {name!r} says twice what happens on the data-parallel dimensions",
            do="name one of " + ", ".join(PRESETS) + ", and tp or tp+sp",
        )
    preset = PRESETS[data[0]] if data else {r: WHOLE for r in mesh.roles if r is Role.DATA}
    beside = dict.fromkeys(asks_for[part] for part in parts if part in asks_for)
    wanted = [role.dim for role in (*preset, *beside)]
    missing = [dim for dim in wanted if dim not in mesh.names]
    extra = [role.dim for role in mesh.roles if role not in preset and role not in BESIDE_DATA]
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
    """Where a parameter of a global shape is stored before the first program says how it is sharded."""
    preset = check_preset(preset_name, mesh)
    sharded = {name for name, storage in preset.items() if storage.shard_parameters}
    if preset_name == AUTO:
        sharded = {role.dim for role in mesh.roles if role.divides_batch}
    return tuple(Shard(0) if name in sharded and shape else REPLICATE for name in mesh.names)


def decide_by_preset(
    program: Program,
    mesh: MeshShape,
    preset_name: str,
    known: Mapping[str, Placements] = NOTHING_KNOWN,
    shared: SharedWalks | None = None,
) -> PlacementDecision:
    """Places every value of a Program by a preset.

    Args:
        program: with global shapes, not placed yet.
        mesh: has the dimensions that the preset names.
        preset_name: presets of :data:`PRESETS` and ``tp``, joined by ``+``.
        known: where another program of the same step stores inputs already, by label.
        shared: walks of this Program that other presets have asked for.

    Returns:
        the decision, in the model's own names.
    """
    preset = check_preset(preset_name, mesh)
    decision = PlacementDraft(preset_name)
    words = preset_name.split("+")
    walks: dict[str, Walk] = {}
    shared = {} if shared is None else shared
    taken: frozenset = frozenset()
    for axis, role in enumerate(mesh.roles):
        if role in BESIDE_DATA:
            labels = {r.name: roles.label(r) for r in program.inputs if isinstance(r, roles.Param)}
            stored = {name: known[label][axis] for name, label in labels.items() if label in known}
            own = tuple(word for word in words if word in BESIDE_DATA[role].words)
            key = (axis, own, tuple(stored.items()))
            if key not in shared:
                shared[key] = BESIDE_DATA[role].walk(program, mesh, axis, words, stored)
            walk, notes = shared[key]
            walks[mesh.names[axis]] = walk
            taken |= _sharded_by_rows(walk)
            decision.notes += notes
    for name, storage in preset.items():
        size = mesh.sizes[mesh.names.index(name)]
        walks[name] = walk_data_parallel(program, size, mesh.data_size, storage, taken)
    record(program, [walks[name] for name in mesh.names], decision)
    return decision.decision()


def walk_along(
    program: Program, mesh: MeshShape, axis: int, preset_name: str, beside: Walk | None = None
) -> Walk:
    """What a preset does along one mesh dimension.

    Args:
        preset_name: of a data-parallel dimension, or ``tp`` with or without ``sp``.
        beside: the walk along a dimension that does not divide the batch, where that is a preset's too.
    """
    if kind := BESIDE_DATA.get(mesh.roles[axis]):
        return kind.walk(program, mesh, axis, preset_name.split("+"), {})[0]
    (storage,) = PRESETS[preset_name].values()
    taken = _sharded_by_rows(beside) if beside is not None else frozenset()
    return walk_data_parallel(program, mesh.sizes[axis], mesh.data_size, storage, taken)


def _sharded_by_rows(walk: Walk) -> frozenset:
    """Parameters whose rows a walk shards, and gradients on their way into the update.

    And those whose rows are read in blocks: rows of other ranks would lie across these.
    """
    inputs = [role for role, placement in walk.inputs.items() if placement == Shard(0)]
    names = {role.name for role in inputs if isinstance(role, roles.Param)}
    nodes = {
        node
        for node in walk.chosen
        if len(walk.now[node]) == 1 and isinstance(p := walk.now[node][0], Shard) and p.dim == 0
    }
    gradients = {node for node in nodes if meta(node)["phase"] != OPTIMIZER}
    return frozenset(names | gradients | walk.rows_in_blocks)


def record(program: Program, walks: Sequence[Walk], decision: PlacementDraft) -> None:
    """Writes what walks along all mesh dimensions, in mesh order, have placed into a decision."""
    for role in program.inputs:
        decision.inputs[roles.label(role)] = tuple(walk.inputs[role] for walk in walks)
    for role in program.outputs:
        decision.outputs[roles.label(role)] = tuple(walk.outputs[role] for walk in walks)
    for node in walks[0].chosen:
        each = [walk.chosen[node] for walk in walks]
        decision.operations[meta(node)["name"]] = OperationPlacement(
            tuple(zip(*(strategy.inputs for strategy in each), strict=True)),
            tuple(
                None if None in placements else tuple(p or REPLICATE for p in placements)
                for placements in zip(*(strategy.outputs for strategy in each), strict=True)
            ),
        )
    for walk in walks:
        decision.unruled |= walk.unruled
