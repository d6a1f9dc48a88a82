"""The user's own objects in a checkpoint: anything with ``state_dict`` and ``load_state_dict``.

A state dict is kept as it is, pickled, so that every type in it comes back. A state that is the same on
all ranks is kept once, and loads on any number of ranks. One that differs (each rank's own position in
its data) is kept for each data-parallel rank, and loads on as many. DTensors in it are kept by torch's
distributed checkpoint, each rank its own part.
"""

import hashlib
import io
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stepgraph.errors import CheckpointError, UsageError, near_misses
from stepgraph.program.layout import replicated
from stepgraph.program.program import Value
from stepgraph.runtime.checkpoints.saved_state import SavedState
from stepgraph.runtime.ranks import largest
from stepgraph.runtime.state import State
from stepgraph.torch_internals import host_device, pytree

ALL, DATA, RANKS = "all ranks", "data-parallel ranks", "ranks"


def check_extras(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The extras by name.

    Raises:
        UsageError: one cannot be saved and loaded.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError(f"extra must be a dict of objects by name, got {type(extra).__name__}")
    for name, item in (extra or {}).items():
        able = all(callable(getattr(item, m, None)) for m in ("state_dict", "load_state_dict"))
        if not isinstance(name, str) or not able:
            raise UsageError(
                f"extra {name!r} is a {type(item).__name__} without state_dict and load_state_dict",
                do="give an object that has both: a data loader, a scheduler, a module",
            )
    return dict(extra or {})


def pack(extra: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, dict[str, DTensor]]]:
    """Each extra's state as bytes, and the DTensors taken out of it by their position."""
    packed, tensors = {}, {}
    for name, item in extra.items():
        leaves, tree = pytree.tree_flatten(item.state_dict())
        mine = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}
        rest = [_Placed(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        stream = io.BytesIO()
        torch.save(pytree.tree_unflatten(rest, tree), stream)
        packed[name] = stream.getvalue()
        if mine:
            tensors[name] = mine
    return packed, tensors


def spread(
    packed: Mapping[str, bytes], state: State
) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, Any]]]:
    """What this rank puts into the checkpoint of each extra, and how the manifest describes it.

    Raises:
        UsageError: on a rank whose extras are not those of all others.
    """
    ranks = state.ranks
    names = zlib.crc32("\n".join(sorted(packed)).encode())
    if largest(ranks, names, -names) != [names, -names]:
        raise UsageError("the ranks bring different extras", do="give every rank the same names")
    if not packed:
        return {}, {}
    digests: list[Any] = [{name: hashlib.sha256(item).digest() for name, item in packed.items()}]
    if ranks.shape.world_size > 1:
        mine, digests = digests[0], [None] * ranks.shape.world_size
        dist.all_gather_object(digests, mine)
    parts, described = {}, {}
    for name, item in packed.items():
        for of in (ALL, DATA, RANKS):
            held: dict[int, set[bytes]] = {}
            for rank, digest in enumerate(digests):
                held.setdefault(_part(state, of, rank), set()).add(digest[name])
            if all(len(values) == 1 for values in held.values()):
                break
        parts[name] = {str(_part(state, of, ranks.rank)): item}
        described[name] = {"of": of, "parts": len(held)}
    return parts, described


def choose(
    extra: Mapping[str, Any], described: Mapping[str, dict[str, Any]], state: State, where: str
) -> dict[str, str]:
    """Which part of each extra this rank loads.

    Raises:
        CheckpointError: the checkpoint has no such extra, or has it for another number of ranks.
    """
    chosen = {}
    for name in extra:
        if name not in described:
            raise CheckpointError(
                f"the checkpoint {where} has no extra {name!r}",
                do=near_misses(name, described) if described else "it was saved without extras",
            )
        of, parts = described[name]["of"], described[name]["parts"]
        ranks = state.ranks.shape
        here = {ALL: 1, DATA: ranks.data_size, RANKS: ranks.world_size}[of]
        if parts != here:
            raise CheckpointError(
                f"extra {name!r} of the checkpoint {where} differs between the {parts} {of} that "
                f"saved it; here are {here}",
                do=f"load on {parts} {of}, or leave it out",
            )
        chosen[name] = str(_part(state, of, state.ranks.rank))
    return chosen


def load(extra: Mapping[str, Any], chosen: Mapping[str, str], saved: SavedState, state: State):
    """Gives every extra its state back."""
    for name, item in extra.items():
        content = saved.read_tree("extra", name, chosen[name])
        # On the host: the object's own load_state_dict puts tensors where it wants them.
        leaves, tree = pytree.tree_flatten(
            torch.load(io.BytesIO(content), map_location=host_device(), weights_only=False)
        )
        filled = [leaf.empty(state) if isinstance(leaf, _Placed) else leaf for leaf in leaves]
        keys = saved.below("extra_tensors", name).items()
        saved.read_into({key: filled[int(position)] for (position,), key in keys})
        item.load_state_dict(pytree.tree_unflatten(filled, tree))


class _Placed:
    """Stands for a DTensor in a pickled state."""

    def __init__(self, tensor: DTensor) -> None:
        names = tensor.device_mesh.mesh_dim_names
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.names, self.placements = names, tuple(tensor.placements)

    def empty(self, state: State) -> DTensor:
        """An empty one on this run's mesh: placed as it was where the mesh has those dimensions."""
        ranks = state.ranks.shape
        placements = self.placements if self.names == ranks.names else replicated(ranks)
        value = Value(self.shape, self.dtype, placements)
        return state.as_dtensor(state.filled(value), value)


def _part(state: State, of: str, rank: int) -> int:
    return {ALL: 0, DATA: state.ranks.shape.data_rank(rank), RANKS: rank}[of]
