"""What each stage of ZeRO, ``ddp`` and ``hsdp`` shard along the mesh dimensions that divide the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepgraph.program.mesh_roles import Role


@dataclass(frozen=True)
class Storage:
    """What is sharded along a data-parallel dimension, and what is on every rank.

    ``accumulate_sharded``: with micro-batches, reduce each one's gradients into a sharded
    accumulator, instead of once at the end. ``gather_again``: a parameter that was gathered for the forward
    is not kept for the backward.
    """

    shard_parameters: bool
    shard_optimizer: bool
    accumulate_sharded: bool
    gather_again: bool = True


WHOLE = Storage(shard_parameters=False, shard_optimizer=False, accumulate_sharded=False)
_ZERO1 = Storage(shard_parameters=False, shard_optimizer=True, accumulate_sharded=False)
_ZERO2 = Storage(shard_parameters=False, shard_optimizer=True, accumulate_sharded=True)
_ZERO3 = Storage(shard_parameters=True, shard_optimizer=True, accumulate_sharded=True)

PRESETS: dict[str, dict[Role, Storage]] = {
    "ddp": {Role.DATA: WHOLE},
    "zero1": {Role.DATA: _ZERO1},
    "zero2": {Role.DATA: _ZERO2},
    "zero3": {Role.DATA: _ZERO3},
    "zero3-keep": {Role.DATA: replace(_ZERO3, gather_again=False)},
    "hsdp": {Role.REPLICATE: WHOLE, Role.SHARD: _ZERO3},
}
