"""Where in the whole tensor a random operation draws, once it is decided which dimension is the batch."""

from __future__ import annotations

import math

from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program.layout import MeshShape, Placements, local_shape
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM


def draw_by_global_row(
    program: Program, decision: PlacementDecision, mesh: MeshShape, micro_batches: int
) -> None:
    """Tells each ``random`` of a micro-batch's program which rows of the global batch it stands for.

    Micro-batch i holds the i-th slice of each rank's rows, so that a mask depends neither on ranks nor on
    micro-batches. Where none is the batch (a mask over parameters), every micro-batch draws its own.
    """
    if micro_batches == 1:
        return
    for node in program.operations():
        if node.target is not RANDOM or node.meta["name"] not in decision.batch_dims:
            continue
        dim, blocks = decision.batch_dims[node.meta["name"]]
        seed, kind, operation, sizes, whole, starts, _, shards = node.args
        rows = [dim, mesh.data_size, micro_batches, blocks]
        whole = list(whole)  # type: ignore[arg-type]
        whole[dim] *= micro_batches  # type: ignore[operator]
        node.args = (seed, kind, operation, sizes, whole, starts, rows, shards)


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
