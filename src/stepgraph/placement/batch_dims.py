"""Which dimension of random numbers is the batch, once it is decided where values live."""

from __future__ import annotations

from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.analysis.batched import drawn_for_rows, of_one_shape
from stepgraph.placement.presets.data_parallel import ranks_that_divide
from stepgraph.placement.presets.named import decide_by_preset
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program.layout import MeshShape, blocks_of, data_mesh
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program, tensor_arguments
from stepgraph.program.randomness import RANDOM


def find_batch_dims(
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
    slices = {
        node: _slice_of_batch(node, decision, mesh) or drawn_for_rows(program, node)
        for node in drawn
    }
    return {
        meta(node)["name"]: (found.dim, blocks_of(found))
        for node, found in slices.items()
        if found is not None
    }


def _slice_of_batch(node: fx.Node, decision: PlacementDecision, mesh: MeshShape) -> Shard | None:
    """How data-parallel ranks divide a random tensor, or what of its shape is made of it."""
    for value in of_one_shape(node):
        (made,) = decision.operations[meta(value)["name"]].outputs
        seen = [made]
        for user in (user for user in value.users if meta(user).get("phase") == FORWARD):
            read = zip(
                tensor_arguments(user), decision.operations[meta(user)["name"]].inputs, strict=True
            )
            seen += [placements for argument, placements in read if argument is value]
        for placements in seen:
            for role, placement in zip(mesh.roles, placements or (), strict=True):
                if role.divides_batch and isinstance(placement, Shard):
                    return placement
    return None
