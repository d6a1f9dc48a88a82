"""What presets do along mesh dimensions that do not divide the batch: one record a role."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.errors import name_a_few
from stepgraph.operators.flex import is_sums
from stepgraph.placement.presets.data_parallel import WHOLE, ranks_that_divide, walk_data_parallel
from stepgraph.placement.presets.tensor_parallel import find_layout, walk_tensor_parallel
from stepgraph.placement.presets.walk import Walk, shapes_of
from stepgraph.program.layout import MeshShape
from stepgraph.program.mesh_roles import Role
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

TENSOR_PARALLEL, SEQUENCE_PARALLEL = "tp", "sp"


@dataclass(frozen=True)
class BesideData:
    """How presets place values along the mesh dimension of a role.

    ``words`` of a preset's name ask for it; it is implied where a mesh has the dimension. ``walk(program,
    mesh, axis, words of the preset, where parameters are stored already)`` gives the walk, and notes.
    """

    words: tuple[str, ...]
    walk: Callable[
        [Program, MeshShape, int, Sequence[str], Mapping[str, Placement]], tuple[Walk, list[str]]
    ]


def _tensor_parallel(
    program: Program,
    mesh: MeshShape,
    axis: int,
    words: Sequence[str],
    stored: Mapping[str, Placement],
) -> tuple[Walk, list[str]]:
    """Tensor parallelism, with sequence-parallel norms where they are asked for."""
    ranks = mesh.sizes[axis]
    layout = find_layout(program, ranks, mesh.data_size, stored)
    sequence = _sequence_dims(program) if SEQUENCE_PARALLEL in words else {}
    walk = walk_tensor_parallel(program, ranks, mesh.data_size, layout, sequence)
    notes = []
    shapes = shapes_of(program)
    whole = [n for n in shapes if len(shapes[n]) > 1 and not isinstance(layout.get(n), Shard)]
    if whole:
        shown = name_a_few(whole)
        notes.append(f"tp keeps these weights, and the work on them, whole on every rank: {shown}")
    sharded = any(walk.now[node] == (Shard(dim),) for node, dim in sequence.items())
    if SEQUENCE_PARALLEL in words and not sharded:
        notes.append("sp: no activation of this model could be sharded along its sequence")
    return walk, notes


def _sequence_dims(program: Program) -> dict[fx.Node, int]:
    """The dimension of (batch, sequence, width) activations, in either order, that is the sequence.

    A data-parallel walk tells where the batch is.
    """
    ranks = ranks_that_divide(program)
    found = {}
    for node, (placement, *_) in walk_data_parallel(program, ranks, ranks, WHOLE).now.items():
        shape = getattr(meta(node)["val"], "shape", ())
        batched = isinstance(placement, Shard) and len(shape) == 3 and placement.dim < 2
        if batched and not is_sums(node) and shape[1 - placement.dim] > 1:
            found[node] = 1 - placement.dim
    return found


BESIDE_DATA: dict[Role, BesideData] = {
    Role.TENSOR: BesideData((TENSOR_PARALLEL, SEQUENCE_PARALLEL), _tensor_parallel),
}
