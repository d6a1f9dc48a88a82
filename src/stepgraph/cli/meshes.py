"""Which meshes to try: those asked for, or the sensible ones of a number of ranks."""

from collections.abc import Sequence

from stepgraph.cost.device import Device
from stepgraph.errors import MeshError, UsageError
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning.request import AUTO
from stepgraph.program.layout import MeshShape
from stepgraph.program.mesh_roles import Role
from stepgraph.runtime.ranks import parse_mesh


def meshes_to_try(
    asked: Sequence[str], ranks: int | None, device: Device
) -> tuple[list[MeshShape], bool]:
    """The meshes to plan for, and whether they were chosen here.

    Args:
        asked: mesh strings, all of one world size; or ``auto`` alone.
        ranks: of ``auto``; otherwise None, or what the meshes hold.

    Raises:
        UsageError, MeshError: contradictions, names without a role.
    """
    if AUTO in asked:
        if len(asked) > 1:
            raise UsageError("--mesh auto stands alone", do="name meshes, or let them be chosen")
        if ranks is None:
            raise UsageError("--mesh auto needs to know how many ranks", do="add --ranks 128")
        return sensible_meshes(ranks, device.ranks_per_node), True
    meshes = [parse_mesh(text) for text in asked]
    sizes = {mesh.world_size for mesh in meshes} | ({ranks} if ranks is not None else set())
    if len(sizes) > 1:
        shown = ", ".join(f"{mesh} has {mesh.world_size}" for mesh in meshes)
        asked_for = "" if ranks is None else f"; --ranks is {ranks}"
        raise MeshError(
            f"meshes are compared on one number of ranks: {shown}{asked_for}",
            do="give meshes whose sizes multiply to the same number",
        )
    return list(dict.fromkeys(meshes)), False


def sensible_meshes(ranks: int, ranks_per_node: int) -> list[MeshShape]:
    """Data and tensor parallelism, the latter inside a node; and shards inside a node, replicas between.

    For 16 ranks in nodes of 8: ``dp=16``, ``dp=8,tp=2``, ... ``dp=2,tp=8``, ``replicate=2,shard=8``,
    ``replicate=2,shard=4,tp=2``, ...
    """
    tensor = [tp for tp in range(1, min(ranks, ranks_per_node) + 1) if ranks % tp == 0]
    tensor = [tp for tp in tensor if ranks_per_node % tp == 0]
    found = [_mesh((Role.DATA, ranks // tp), (Role.TENSOR, tp)) for tp in tensor]
    for tp in tensor:
        shard = ranks_per_node // tp
        if shard > 1 and ranks % ranks_per_node == 0 and ranks > ranks_per_node:
            parts = (Role.REPLICATE, ranks // ranks_per_node), (Role.SHARD, shard)
            found.append(_mesh(*parts, (Role.TENSOR, tp)))
    return list(dict.fromkeys(found))


def _mesh(*dims: tuple[Role, int]) -> MeshShape:
    """Without a dimension of one rank, but for the first."""
    kept = (dim for i, dim in enumerate(dims) if i == 0 or dim[1] > 1)
    return MeshShape(tuple((role.dim, size) for role, size in kept))


def placement_on(mesh: MeshShape, placement: str) -> str | None:
    """A placement as a mesh of one's own choosing takes it; None where it does not.

    ``zero3`` on replicas of shards is ``hsdp``.
    """
    for name in (placement, placement.replace("zero3", "hsdp")):
        try:
            check_preset(name, mesh)
        except MeshError:
            continue
        return name
    return None
