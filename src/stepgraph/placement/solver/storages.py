"""Where parameters, their gradients and optimizer states may be stored, and what the update costs then."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.cost.work import matmul_dtype, node_flops, runs_no_kernel, size_in_bytes
from stepgraph.placement.rules.coded import Coded
from stepgraph.placement.rules.redistribution import Moves
from stepgraph.placement.solver.dataflow import is_stored_cast, update_operations
from stepgraph.placement.solver.groups import folded
from stepgraph.program import roles
from stepgraph.program.layout import Placements, local_shape
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, Value, tensor_arguments

REPLICATE = Replicate()


@dataclass(frozen=True)
class Storage:
    """Where a parameter is stored between steps, and where its gradient and states are updated."""

    stored: Placements
    updated: Placements


@dataclass
class Stored:
    """Parameters that are stored alike: the ways to do it, seconds and bytes of each for one of them."""

    parameters: list[str]
    nodes: list[fx.Node]
    ways: list[Storage] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


class Storages:
    """Ways to store every parameter of a Program.

    Args:
        program: global, with ``traffic`` assigned.
        moves: of the mesh and the device.
        learned: names of the parameters that get a gradient.
    """

    def __init__(self, program: Program, moves: Moves, learned: set[str]) -> None:
        self.program, self.learned = program, learned
        self.mesh, self.device, self.moves = moves.mesh, moves.device, moves
        self.updates = update_operations(program)
        added_up = [role.name for role in program.outputs if isinstance(role, roles.NewAccumulator)]
        self.accumulated = {name.removeprefix("grad:") for name in added_up}
        self.states: dict[str, list[tuple[int, ...]]] = {}
        for role, _, value in program.input_rows:
            if isinstance(role, roles.OptimizerState) and value.shape:
                kind = (value.dtype.itemsize, *value.shape)
                self.states.setdefault(role.owner, []).append(kind)

    def find(self) -> list[Stored]:
        """One entry for all parameters of repeated layers that play the same part."""
        found: dict[Any, Stored] = {}
        for role, node, value in self.program.input_rows:
            if not isinstance(role, roles.Param):
                continue
            casts = tuple(user for user in node.users if is_stored_cast(user))
            kind = (
                folded(role.name), value.shape, value.dtype, tuple(meta(c)["val"].dtype for c in casts),
                role.name in self.learned, tuple(self.states.get(role.name, ())),
                len(self.updates.get(role.name, ())),
            )  # fmt: skip
            if kind not in found:
                found[kind] = Stored([], [])
                self._enumerate(found[kind], role.name, value, casts)
            found[kind].parameters.append(role.name)
            found[kind].nodes += [node, *casts]
        return list(found.values())

    def _enumerate(
        self, stored: Stored, name: str, value: Value, casts: tuple[fx.Node, ...]
    ) -> None:
        shape, itemsize = value.shape, value.dtype.itemsize
        shards = [Shard(dim) for dim in range(min(len(shape), 2))]
        ways: list[tuple[Placement, Placement]] = [(REPLICATE, REPLICATE)]
        ways += [(shard, shard) for shard in shards]
        if self.updates.get(name) or name in self.accumulated:
            ways += [(REPLICATE, shard) for shard in shards]
        for combination in itertools.product(ways, repeat=len(self.mesh.dims)):
            storage = Storage(*map(tuple, zip(*combination, strict=True)))
            if not self._storable(shape, storage):
                continue
            own = math.prod(local_shape(shape, storage.stored, self.mesh)) * itemsize
            part = math.prod(local_shape(shape, storage.updated, self.mesh))
            used = own + (part * itemsize if name in self.learned else 0)
            for size, *state in self.states.get(name, ()):
                used += size * (part if tuple(state) == tuple(shape) else math.prod(state))
            seconds = self._update_seconds(name, part / max(1, math.prod(shape)))
            gathered = storage.updated, storage.stored
            seconds += self.moves.cost(shape, value.dtype, *gathered, merged=True).seconds
            for cast in casts:
                moved = own + own // itemsize * meta(cast)["val"].dtype.itemsize
                seconds += self.device.seconds(0.0, moved, value.dtype)
            stored.ways.append(storage)
            stored.cost.append(seconds)
            stored.memory.append(float(used))

    def _storable(self, shape: tuple[int, ...], storage: Storage) -> bool:
        """Even shards, or rows sharded unevenly along one mesh dimension and nothing else."""
        for placements in (storage.stored, storage.updated):
            shards = [p for p in placements if isinstance(p, Shard)]
            even = Coded([placements]).fits(shape, self.mesh.sizes)[0]
            if shards and not even and shards != [Shard(0)]:
                return False
        return True

    def _update_seconds(self, name: str, part: float) -> float:
        total = 0.0
        for node in self.updates.get(name, ()):
            if runs_no_kernel(node):
                continue
            reads, writes = meta(node)["traffic"]
            moved = size_in_bytes(meta(node)["val"]) if writes else 0
            for argument, read in zip(tensor_arguments(node), reads, strict=True):
                moved += meta(argument)["val"].nbytes if read else 0
            starts = meta(node).get("starts", True)
            total += self.device.seconds(
                node_flops(node) * part, moved * part, matmul_dtype(node), starts
            )
        return total
