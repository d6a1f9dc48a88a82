"""The options of a group of operations on a whole mesh, and what each costs on one rank."""

import operator
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.cost.work import (
    looks_up,
    matmul_dtype,
    node_flops,
    runs_no_kernel,
    size_in_bytes,
    stored_bytes,
)
from stepgraph.operators import own
from stepgraph.operators.entries import Strategy, results_of
from stepgraph.operators.views import viewed
from stepgraph.placement.rules.coded import Coded
from stepgraph.placement.rules.redistribution import Cost, Moves
from stepgraph.placement.rules.vocabulary import LOCAL_FORMS, rows_sharded
from stepgraph.placement.solver.dataflow import (
    decided_here,
    needed_by_backward,
    values_that_vary,
)
from stepgraph.placement.solver.groups import Group
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments

REPLICATE = Replicate()
_SMALL = 32 * 2**20  # bytes
# Of a rank's share of a step's FLOPs: so many may be done again on ranks that could divide them.
_REPEATED = 0.005

# Per option the changes of placement inside a group: which of its operations' result, and what it costs.
Inside = list[list[tuple[int, Cost]]]


class Options:
    """Options of groups: one of a group's own per mesh dimension.

    Args:
        program: global, with ``traffic`` assigned.
        moves: of the mesh and the device.
        recomputed: stable names of forward operations that are not kept for the backward.
        free: nobody asked for anything. Then there is less to choose from: dimensions that hold rows of the
            batch are sharded alike, small constants are whole, products are divided as far as can be.
    """

    def __init__(
        self, program: Program, moves: Moves, recomputed: Collection[str], free: bool = True
    ) -> None:
        self._free = free
        self.mesh, self.device, self.moves = moves.mesh, moves.device, moves
        self.needed = needed_by_backward(program, recomputed)
        self._varying = values_that_vary(program)
        self._recomputed = frozenset(recomputed)
        self._flops = {
            node: node_flops(node) for node in program.operations() if decided_here(node)
        }
        self._notable = _REPEATED * sum(self._flops.values()) / self.mesh.world_size

    def of(self, group: Group, count: int = 1) -> list[tuple[int, ...]]:
        """Options on the whole mesh: one per dimension, where every value is sharded evenly.

        Args:
            count: groups that are decided alike.
        """
        sizes, every = self.mesh.sizes, np.arange(len(group.options))[:, None]
        single = [np.flatnonzero(self._fit(group, every, (size,))) for size in sizes]
        grid = np.meshgrid(*single, indexing="ij")
        found = np.stack([axis.ravel() for axis in grid], axis=1)
        # Mesh dimensions that hold rows of the batch are sharded alike: what is stored may still differ.
        data = [axis for axis, role in enumerate(self.mesh.roles) if role.divides_batch]
        if self._free and data:
            found = found[(found[:, data] == found[:, data[:1]]).all(axis=1)]
        if len(sizes) > 1:
            found = found[self._fit(group, found, sizes)]
        if self._free:
            found = found[self._divides(group, found, count)]
        options = [tuple(map(int, option)) for option in found]
        if self._free and self._is_small_constant(group):
            whole = [
                all(p == REPLICATE for s in way.values() for p in s.outputs)
                for way in group.options
            ]
            return [o for o in options if all(whole[way] for way in o)] or options
        return options

    def seconds(
        self, groups: Sequence[Group], options: Sequence[tuple[int, ...]], inside: Inside
    ) -> np.ndarray:
        """Time of a class of groups on one rank under each option, with what ranks add up inside them."""
        if not options:
            return np.zeros(0)
        first, picked = groups[0], np.array(options)
        total = len(groups) * np.array([sum(cost.seconds for _, cost in each) for each in inside])
        for i, node in enumerate(first.nodes):
            runs: int | np.ndarray = len(groups)
            if again := sum(self.runs_again(group.nodes[i]) for group in groups):
                runs = runs + again * ~_pending(node, first, picked)  # sums are kept
            total = total + runs * self._node_seconds(node, first, options)
        return total

    def runs_again(self, node: fx.Node) -> bool:
        """Whether an operation is recomputed in the backward."""
        return meta(node)["name"] in self._recomputed and node in self.needed

    def _is_small_constant(self, group: Group) -> bool:
        """What depends on nothing and is small is made whole on every rank, without a thought."""
        if any(node in self._varying for node in group.nodes):
            return False
        return sum(size_in_bytes(meta(node)["val"]) for node in group.nodes) <= _SMALL

    def _fit(self, group: Group, options: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """Which of many options shard every value evenly."""
        good = np.ones(len(options), bool)
        seen = set()
        for node in group.nodes:
            ways = [option[node] for option in group.options]
            values = [meta(argument)["val"] for argument in tensor_arguments(node)]
            columns = [(v, tuple(w.inputs[i] for w in ways)) for i, v in enumerate(values)]
            results = results_of(node)
            columns += [(v, tuple(w.outputs[i] for w in ways)) for i, v in enumerate(results)]
            for value, column in columns:
                if not isinstance(value, torch.Tensor) or None in column:
                    continue
                if (value.shape, column) not in seen:
                    seen.add((value.shape, column))
                    coded = Coded([(placement,) for placement in column])
                    good &= coded.at(options).fits(value.shape, sizes)
            if len(sizes) > 1 and node.target in LOCAL_FORMS:
                rows = np.array([_shards_rows(node, way) for way in ways])
                good &= rows[options].sum(axis=1) < 2
        return good

    def _divides(self, group: Group, options: np.ndarray, count: int) -> np.ndarray:
        """Which of many options divide the FLOPs of a group about as far as any does.

        A cost model that is wrong about the time of a call would have each rank compute all.
        """
        work = np.zeros(len(options))
        for node in group.nodes:
            if flops := self._flops[node]:
                work += count * flops / self._parts(node, group, options)
        return work <= work.min(initial=np.inf) + self._notable

    def _parts(self, node: fx.Node, group: Group, options: np.ndarray) -> np.ndarray:
        """Over how many ranks each option divides an operation."""
        ways = [option[node] for option in group.options]
        divided = [any(isinstance(p, Shard) for p in (*w.inputs, *w.outputs)) for w in ways]
        return np.where(np.array(divided)[options], np.array(self.mesh.sizes), 1).prod(axis=1)

    def _node_seconds(
        self, node: fx.Node, group: Group, options: Sequence[tuple[int, ...]]
    ) -> np.ndarray:
        """Time of one operation under each option."""
        if runs_no_kernel(node) or not options:
            return np.zeros(max(1, len(options)))
        ways = [option[node] for option in group.options]
        picked = np.array(options)
        parts = self._parts(node, group, picked)
        reads, writes = meta(node)["traffic"]
        result = np.zeros(len(options))
        for i, value in enumerate(results_of(node)):
            if isinstance(value, torch.Tensor):
                result += self._bytes(value, [w.outputs[i] for w in ways], picked)
        moved = result * writes
        for i, (argument, read) in enumerate(zip(tensor_arguments(node), reads, strict=True)):
            if read and isinstance(meta(argument)["val"], torch.Tensor):
                size = self._bytes(meta(argument)["val"], [w.inputs[i] for w in ways], picked)
                moved += np.minimum(size, result) if i == 0 and looks_up(node) else size
        if (told := own.cost_of(node)) is not None:
            moved = told[1] / parts
        starts = meta(node).get("starts", True)
        return self.device.seconds(self._flops[node] / parts, moved, matmul_dtype(node), starts)

    def _is_kept(self, node: fx.Node) -> bool:
        stays = node in self.needed and meta(node)["name"] not in self._recomputed
        return stays and viewed(node) is None

    def temporary_bytes(
        self, group: Group, options: Sequence[tuple[int, ...]], inside: Inside
    ) -> np.ndarray:
        """What the largest operation of a group reads and writes that is not kept anyway, on one rank."""
        most = np.array([max((cost.temporary for _, cost in each), default=0) for each in inside])
        picked = self._rows(options)
        for node in group.nodes:
            if viewed(node) is not None:
                continue
            ways = [option[node] for option in group.options]
            values = [
                (value, [w.outputs[i] for w in ways])
                for i, value in enumerate(results_of(node))
                if not self._is_kept(node)
            ]
            values += [
                (meta(argument)["val"], [w.inputs[i] for w in ways])
                for i, argument in enumerate(tensor_arguments(node))
                if argument.op == "call_function" and not self._is_kept(argument)
            ]
            sizes = [
                self._bytes(value, column, picked)
                for value, column in values
                if isinstance(value, torch.Tensor)
            ]
            most = np.maximum(most, sum(sizes, start=np.zeros(len(options))))
        return most

    def kept_bytes(
        self, groups: Sequence[Group], options: Sequence[tuple[int, ...]], inside: Inside
    ) -> np.ndarray | None:
        """What all groups of a class keep for the backward; pending sums are kept once they are summed."""
        if not options:
            return None
        total = np.zeros(len(options))
        picked = self._rows(options)
        for number, changes in enumerate(inside):
            for position, cost in changes:
                times = sum(group.nodes[position] in self.needed for group in groups)
                total[number] += times * cost.kept
        for group in groups:
            for node in group.nodes:
                if not self._is_kept(node):
                    continue
                for i, value in enumerate(results_of(node)):
                    if not isinstance(value, torch.Tensor):
                        continue
                    column = [option[node].outputs[i] for option in group.options]
                    size = self._bytes(value, column, picked)
                    total += np.where(_pending(node, group, picked, i), 0.0, size)
        return total if total.any() else None

    def _rows(self, options: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Options as an array, one a row."""
        return np.array(options, int).reshape(len(options), len(self.mesh.sizes))

    def inside(self, group: Group, options: Sequence[tuple[int, ...]]) -> Inside:
        """Of each option what is added up over ranks inside a group."""
        found: Inside = []
        position = {node: i for i, node in enumerate(group.nodes)}
        edges = [edge for edge in group.edges() if edge[0].target is not operator.getitem]
        for option in options:
            ways = [group.options[o] for o in option]
            changes: dict[tuple[fx.Node, tuple, tuple], None] = {}
            for argument, node, i in edges:
                made = tuple(way[argument].outputs[0] for way in ways)
                wanted = tuple(way[node].inputs[i] for way in ways)
                if made != wanted and node.target is not operator.getitem:
                    changes[argument, made, wanted] = None
            costs = []
            for argument, made, wanted in changes:
                value = meta(argument)["val"]
                change = tuple(value.shape), value.dtype, made, wanted, value.stride()
                costs.append((position[argument], self.moves.cost(*change)))
            found.append(costs)
        return found

    def _bytes(self, value: torch.Tensor, column: list, options: np.ndarray) -> np.ndarray:
        """Bytes of one rank's part; what an ``expand`` repeats counts once."""
        sharded = [isinstance(p, Shard) and value.stride()[p.dim] != 0 for p in column]
        ranks = np.where(np.array(sharded)[options], np.array(self.mesh.sizes), 1)
        return stored_bytes(value) / ranks.prod(axis=1)


def _pending(node: fx.Node, group: Group, picked: np.ndarray, result: int = 0) -> np.ndarray:
    """Under which options (a row each) a result is still to be summed over ranks."""
    column = [isinstance(option[node].outputs[result], Partial) for option in group.options]
    return np.array(column)[picked].any(axis=1)


def _shards_rows(node: fx.Node, way: Strategy) -> bool:
    placements = ([(p,) for p in part] for part in (way.inputs, way.outputs))
    return rows_sharded(node, *placements) is not None  # type: ignore[arg-type]
