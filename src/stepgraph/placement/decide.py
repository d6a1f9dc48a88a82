"""Decides where every value of a Program lives, and which dimension of random numbers is the batch then."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.analysis.rows import drawn_for_rows, of_one_shape
from stepgraph.cost.devices import Device
from stepgraph.placement.presets.data_parallel import ranks_that_divide
from stepgraph.placement.presets.named import SharedWalks, check_preset, decide_by_preset
from stepgraph.placement.solver.room import Room
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.planning.request import AUTO
from stepgraph.program.layout import MeshShape, Placements, blocks_of, data_mesh
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program, tensor_arguments
from stepgraph.program.randomness import RANDOM


def decide(
    program: Program,
    mesh: MeshShape,
    policy: str,
    *,
    known_inputs: Mapping[str, Placements],
    device: Device | None = None,
    constraints: Mapping[str, str] | None = None,
    room: Room | None = None,
    recomputed: Collection[str] = (),
    shared: SharedWalks | None = None,
) -> PlacementDecision:
    """Where every value of a global Program lives; it stays as it is.

    Args:
        program: in the form that :func:`wants_views_apart` asks for.
        policy: a preset, or ``auto``.
        known_inputs: where other programs of the step store inputs, by label.
        device: whose costs count, for ``auto``.
        constraints, room, recomputed: of :func:`decide_automatically`.
        shared: of :func:`decide_by_preset`.
    """
    if policy != AUTO:
        decision = decide_by_preset(program, mesh, policy, known_inputs, shared)
    else:
        assert device is not None, "a plan that is to be found says for which device"
        # Here, for no preset needs HiGHS, which takes 3 MiB and 10 ms.
        from stepgraph.placement.solver.automatic import decide_automatically

        decision = decide_automatically(
            program, mesh, device, known_inputs, constraints, room, recomputed
        )
    return replace(decision, batch_dims=_find_batch_dims(program, decision, mesh))


def wants_views_apart(policy: str) -> bool:
    """Whether each reader of a view has to have one of its own: a solver moves what is viewed."""
    return policy == AUTO


def reduces_each_micro_batch(policy: str, mesh: MeshShape) -> bool:
    """Whether gradients are reduced for every micro-batch, because accumulators are sharded."""
    return any(storage.accumulate_sharded for storage in check_preset(policy, mesh).values())


def _find_batch_dims(
    program: Program, decision: PlacementDecision, mesh: MeshShape
) -> dict[str, tuple[int, int]]:
    """By stable name of a random operation: the dimension that is the batch, and its blocks.

    It is the dimension that data-parallel ranks divide, or one as long as the batch. What has none (a mask
    over parameters) is not named.
    """
    drawn = [node for node in program.operations() if node.target is RANDOM]
    if drawn and mesh.data_size == 1:  # nobody divides the batch: ask ranks that are not there
        mesh = data_mesh(ranks_that_divide(program))
        decision = decide_by_preset(program, mesh, "ddp")
    found: dict[str, tuple[int, int]] = {}
    for node in drawn:
        if shard := _slice_of_batch(node, decision, mesh) or drawn_for_rows(program, node):
            found[meta(node)["name"]] = shard.dim, blocks_of(shard)
    return found


def _slice_of_batch(node: fx.Node, decision: PlacementDecision, mesh: MeshShape) -> Shard | None:
    """How data-parallel ranks divide a random tensor, or what of its shape is made of it."""
    for value in of_one_shape(node):
        (made,) = decision.operations[meta(value)["name"]].outputs
        seen = [made]
        for user in (user for user in value.users if meta(user).get("phase") == FORWARD):
            inputs = decision.operations[meta(user)["name"]].inputs
            read = zip(tensor_arguments(user), inputs, strict=True)
            seen += [placements for argument, placements in read if argument is value]
        for placements in seen:
            for role, placement in zip(mesh.roles, placements or (), strict=True):
                if role.divides_batch and isinstance(placement, Shard):
                    return placement
    return None
