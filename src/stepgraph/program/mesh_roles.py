"""What the dimensions of a mesh are for. Code asks for a dimension's role, and never for its name."""

from enum import Enum

from stepgraph.errors import MeshError, near_misses


class Role(Enum):
    """Each with the name of such a dimension, and whether its ranks hold different rows of the batch."""

    DATA = "dp", True
    REPLICATE = "replicate", True
    SHARD = "shard", True
    TENSOR = "tp", False

    def __init__(self, dim: str, divides_batch: bool) -> None:
        self.dim, self.divides_batch = dim, divides_batch


_ROLE_OF = {role.dim: role for role in Role}


def role_of(dim: str) -> Role:
    """The role of a mesh dimension.

    Raises:
        MeshError: nobody knows what to do along a dimension of that name.
    """
    if dim not in _ROLE_OF:
        raise MeshError(
            f"nobody knows the role of a mesh dimension {dim!r}",
            why="what ranks along it hold, and whether they divide the batch, follows from its role",
            do=near_misses(dim, _ROLE_OF),
        )
    return _ROLE_OF[dim]
