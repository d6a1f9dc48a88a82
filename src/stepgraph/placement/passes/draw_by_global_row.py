"""Where in the whole tensor a random operation draws, once it is known which dimension is the batch."""

from __future__ import annotations

import math

from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.analysis.batched import drawn_for_rows, of_one_shape
from stepgraph.placement.presets.named import decide, ranks_that_divide
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program.layout import (
    MeshShape,
    Placements,
    blocks_of,
    data_mesh,
    local_shape,
)
from stepgraph.program.program import FORWARD, Program, tensor_arguments
from stepgraph.program.randomness import RANDOM


def draw_by_global_row(
    program: Program, decision: PlacementDecision, mesh: MeshShape, micro_batches: int
) -> None:
    """Tells each ``random`` of a micro-batch's program which rows of the global batch it stands for.

    The dimension that data-parallel ranks divide is the batch, or one as long as the batch; micro-batch i
    holds the i-th slice of each rank's rows, so that a mask depends neither on ranks nor on micro-batches.
    Where there is none (a mask over parameters), every micro-batch draws its own.
    """
    found = [node for node in program.operations() if node.target is RANDOM]
    if micro_batches == 1 or not found:
        return
    ranks = mesh.data_size
    if ranks == 1:  # nobody divides the batch: ask where ranks that are not there would
        mesh = data_mesh(ranks_that_divide(program))
        decision = decide(program, mesh, "ddp")
    for node in found:
        cut = _cut_of_batch(node, decision, mesh) or drawn_for_rows(program, node)
        if cut is None:
            continue
        seed, kind, operation, sizes, whole, starts, _, shards = node.args
        rows = [cut.dim, ranks, micro_batches, blocks_of(cut)]
        whole = list(whole)  # type: ignore[arg-type]
        whole[cut.dim] *= micro_batches  # type: ignore[operator]
        node.args = (seed, kind, operation, sizes, whole, starts, rows, shards)


def _cut_of_batch(node: fx.Node, decision: PlacementDecision, mesh: MeshShape) -> Shard | None:
    """How data-parallel ranks divide a random tensor, or what of its shape is made of it."""
    for value in of_one_shape(node):
        (made,) = decision.operations[value.meta["name"]].outputs
        seen = [made]
        for user in (user for user in value.users if user.meta["phase"] == FORWARD):
            read = zip(
                tensor_arguments(user), decision.operations[user.meta["name"]].inputs, strict=True
            )
            seen += [placements for argument, placements in read if argument is value]
        for placements in seen:
            for role, placement in zip(mesh.roles, placements or (), strict=True):
                if role.divides_batch and isinstance(placement, Shard):
                    return placement
    return None


def local_part_of(
    node: fx.Node, args: tuple, placements: Placements | None, mesh: MeshShape
) -> tuple:
    """Arguments of a placed ``random``: this rank's sizes, and the mesh dimensions that cut it."""
    seed, kind, operation, sizes, whole, starts, rows, _ = args
    cuts = {
        name: (placement.dim, size)
        for (name, size), placement in zip(mesh.dims, placements or (), strict=True)
        if isinstance(placement, Shard)
    }
    local = list(local_shape(sizes, placements or (), mesh))
    if rows:
        dim, ranks, micro_batches, blocks = rows
        parts = math.prod(size for name, (d, size) in cuts.items() if d == dim)
        rows = [dim, ranks // parts, micro_batches, blocks]
    cut_by = " ".join(f"{dim}:{name}" for name, (dim, _) in cuts.items())
    return (seed, kind, operation, local, whole, starts, rows, cut_by)
