"""Where in the whole tensor a random operation draws, once it is known which dimension is the batch."""

from __future__ import annotations

from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.placement.data_parallel import DataParallel, Storage
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program.layout import TENSOR_PARALLEL, MeshShape, Placements, local_shape
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM


def draw_by_global_row(
    program: Program, decision: PlacementDecision, mesh: MeshShape, micro_batches: int
) -> None:
    """Tells each ``random`` of a micro-batch's program which rows of the global batch it stands for.

    The dimension that data-parallel ranks divide is the batch; micro-batch i holds the i-th slice of
    each rank's rows, so that a mask depends neither on ranks nor on micro-batches. Where no dimension
    is divided (a mask over parameters), every micro-batch draws its own.
    """
    found = [node for node in program.operations() if node.target is RANDOM]
    if micro_batches == 1 or not found:
        return
    alone = None
    if mesh.names == (TENSOR_PARALLEL,):  # nothing says where the batch is: ask for one rank
        alone = DataParallel(program, 1, 1, Storage(False, False, False)).decide()
    for node in found:
        (placements,) = decision.operations[node.meta["name"]].outputs
        ranks, batch_dim = 1, None
        for name, placement, size in zip(mesh.names, placements or (), mesh.sizes, strict=True):
            if name != TENSOR_PARALLEL and isinstance(placement, Shard):
                ranks, batch_dim = ranks * size, placement.dim
        if alone is not None and isinstance(cut := alone.now[node][0], Shard):
            batch_dim = cut.dim
        if batch_dim is None:
            continue
        seed, kind, operation, sizes, whole, starts, _, shards = node.args
        rows = [batch_dim, ranks, micro_batches]
        whole = list(whole)  # type: ignore[arg-type]
        whole[batch_dim] *= micro_batches  # type: ignore[operator]
        node.args = (seed, kind, operation, sizes, whole, starts, rows, shards)


def local_part_of(
    node: fx.Node, args: tuple, placements: Placements | None, mesh: MeshShape
) -> tuple:
    """Arguments of a placed ``random``: this rank's sizes, and the mesh dimensions that cut it."""
    seed, kind, operation, sizes, whole, starts, rows, _ = args
    cut_by = [
        f"{placement.dim}:{name}"
        for name, placement in zip(mesh.names, placements or (), strict=True)
        if isinstance(placement, Shard)
    ]
    local = list(local_shape(sizes, placements or (), mesh))
    rows = [rows[0], 1, rows[2]] if rows else rows
    return (seed, kind, operation, local, whole, starts, rows, " ".join(cut_by))
