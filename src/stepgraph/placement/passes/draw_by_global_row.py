"""Where in the whole tensor a random operation draws, once it is decided which dimension is the batch."""

import math

import torch
from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements, local_shape
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM
from stepgraph.program.record import DISTRIBUTION, Results, Values, program_pass


def _expected(
    values: Values,
    before: Program,
    after: Program,
    decision: PlacementDecision,
    mesh: MeshShape,
    micro_batches: int,
) -> Results:
    """The numbers of the whole batch, drawn at once; of them the rows that this micro-batch holds."""
    if micro_batches == 1 or roles.Seed() not in before.inputs:
        return values.execute(before)
    seed, step, micro_batch = values.given(before)[roles.Seed()].tolist()

    def draw(node: fx.Node, args: tuple, kwargs: dict) -> torch.Tensor:
        dim, blocks = decision.batch_dims[meta(node)["name"]]
        _, kind, operation, sizes, whole, *_ = args
        whole = list(whole)
        whole[dim] *= micro_batches
        at_once = torch.tensor([seed, step, 0])
        numbers = RANDOM(at_once, kind, operation, whole, whole, [0] * len(whole), [], "")
        # Of each block, of each rank's rows, the slice of this micro-batch.
        each = whole[dim] // (blocks * mesh.data_size * micro_batches)
        parts = numbers.unflatten(dim, (blocks, mesh.data_size, micro_batches, each))
        return parts.select(dim + 2, micro_batch).flatten(dim, dim + 2)

    drawn = [n for n in before.operations() if n.target is RANDOM]
    names = [meta(n)["name"] for n in drawn if meta(n)["name"] in decision.batch_dims]
    return values.execute(before, dict.fromkeys(names, draw))


@program_pass(
    reads="``random`` operations, and which dimension of each is the batch",
    writes="their rows and whole shape",
    preserves=DISTRIBUTION,
    reference=_expected,
)
def draw_by_global_row(
    program: Program, decision: PlacementDecision, mesh: MeshShape, micro_batches: int
) -> Program:
    """Tells each ``random`` of a micro-batch's program which rows of the global batch it stands for.

    Micro-batch i holds the i-th slice of each rank's rows, so that a mask depends neither on ranks nor on
    micro-batches. Where none is the batch (a mask over parameters), every micro-batch draws its own.
    """
    if micro_batches == 1:
        return program
    for node in program.operations():
        if node.target is not RANDOM or meta(node)["name"] not in decision.batch_dims:
            continue
        dim, blocks = decision.batch_dims[meta(node)["name"]]
        seed, kind, operation, sizes, whole, starts, _, shards = node.args
        rows = [dim, mesh.data_size, micro_batches, blocks]
        whole = list(whole)  # type: ignore[arg-type]
        whole[dim] *= micro_batches  # type: ignore[operator]
        node.args = (seed, kind, operation, sizes, whole, starts, rows, shards)
    return program


def local_part_of(
    node: fx.Node, args: tuple, placements: Placements | None, mesh: MeshShape
) -> tuple:
    """Arguments of a placed ``random``: this rank's sizes, and the mesh dimensions that shard it."""
    seed, kind, operation, sizes, whole, starts, rows, _ = args
    shards = {
        name: (placement.dim, size)
        for (name, size), placement in zip(mesh.dims, placements or (), strict=True)
        if isinstance(placement, Shard)
    }
    local = list(local_shape(sizes, placements or (), mesh))
    if rows:
        dim, ranks, micro_batches, blocks = rows
        parts = math.prod(size for name, (d, size) in shards.items() if d == dim)
        rows = [dim, ranks // parts, micro_batches, blocks]
    sharded_by = " ".join(f"{dim}:{name}" for name, (dim, _) in shards.items())
    return (seed, kind, operation, local, whole, starts, rows, sharded_by)
