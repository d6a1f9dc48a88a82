"""What presets do along mesh dimensions that do not divide the batch: one record a role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.errors import name_a_few
from stepgraph.placement.presets.data_parallel import DataParallel, ranks_that_divide
from stepgraph.placement.presets.tensor_parallel import TensorParallel, find_layout
from stepgraph.placement.presets.walk import REPLICATE, Walk
from stepgraph.placement.presets.zero_stages import Storage
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


def walk_tensor_parallel(
    program: Program,
    mesh: MeshShape,
    axis: int,
    words: Sequence[str],
    stored: Mapping[str, Placement],
) -> tuple[Walk, list[str]]:
    """Tensor parallelism, with sequence-parallel norms where they are asked for."""
    ranks = mesh.sizes[axis]
    layout = find_layout(program, ranks, mesh.data_size, stored)
    sequence = _sequence_dims(program) if SEQUENCE_PARALLEL in words else None
    walk = TensorParallel(program, ranks, mesh.data_size, layout, sequence)
    walk.decide()
    notes = _kept_whole(walk)
    if sequence is not None and not _cuts_the_sequence(walk):
        notes.append("sp: no activation of this model could be cut along its sequence")
    return walk, notes


def _sequence_dims(program: Program) -> dict[fx.Node, int]:
    """The dimension of (batch, sequence, width) activations, in either order, that is the sequence.

    A data-parallel walk tells where the batch is.
    """
    ranks = ranks_that_divide(program)
    walk = DataParallel(program, ranks, ranks, Storage(False, False, False)).decide()
    found = {}
    for node, placements in walk.now.items():
        value, placement = meta(node)["val"], placements[0]
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


BESIDE_DATA: dict[Role, BesideData] = {
    Role.TENSOR: BesideData((TENSOR_PARALLEL, SEQUENCE_PARALLEL), walk_tensor_parallel),
}
