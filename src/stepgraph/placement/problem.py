"""From a Program to an optimisation: blocks and links, with what they cost on a device.

Every class of groups (:mod:`stepgraph.placement.groups`) is a block, every parameter's storage another,
what the outside says (a batch, a loss) a block of one option. Every value that one block reads from
another is a link. Costs are those of one rank: roofline times of operations on their parts, and times of
collectives.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.cost.devices import Device
from stepgraph.cost.memory import viewed
from stepgraph.cost.work import looks_up, matmul_dtype, node_flops, runs_no_kernel
from stepgraph.placement.groups import (
    Group,
    decided_here,
    find_groups,
    find_strategies,
    folded,
    share,
)
from stepgraph.placement.optimise import BACKWARD, FORWARD, Block, Link, Problem, Reader
from stepgraph.placement.redistribution import Coded, Moves
from stepgraph.placement.rules import Strategy, results_of, tensor_arguments
from stepgraph.placement.vocabulary import LOCAL_FORMS, rows_cut
from stepgraph.program import roles
from stepgraph.program.layout import TENSOR_PARALLEL, MeshShape, Placements, local_shape, replicated
from stepgraph.program.program import BACKWARD as BACKWARD_PHASE
from stepgraph.program.program import OPTIMIZER, Program, tensors_of

REPLICATE = Replicate()


@dataclass(frozen=True)
class Storage:
    """Where a parameter is stored between steps, and where its gradient and states are updated."""

    stored: Placements
    updated: Placements


@dataclass(eq=False)
class Choice:
    """What a block's options mean: placements of its operations, of its ports, or a storage."""

    block: Block
    groups: list[Group] = field(default_factory=list)
    options: list[tuple[int, ...]] = field(default_factory=list)  # per mesh dimension, of a group
    parameters: list[str] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    pinned: Placements | None = None

    def strategies(self, group: Group, option: int) -> dict[fx.Node, tuple[Strategy, ...]]:
        """Per operation of a group one strategy for each mesh dimension."""
        picked = [group.options[o] for o in self.options[option]]
        return {node: tuple(way[node] for way in picked) for node in group.nodes}


class Model:
    """The optimisation of one Program; ``choices`` say what its blocks mean.

    Args:
        program: global, with ``traffic`` assigned.
        pins: placements that values must have: inputs and results by role, in mesh order.
        storage_allowed: whether a parameter (its name) may be stored so.
        option_allowed: whether a group may take an option: (group, strategies per operation).
        memory_limit: bytes of one rank for parameters, gradients, optimizer states, and what is kept for
            the backward.
        recomputed: stable names of forward operations that are not kept for the backward.
    """

    def __init__(
        self,
        program: Program,
        mesh: MeshShape,
        device: Device,
        pins: Mapping[Any, Placements],
        storage_allowed: Callable[[str, Storage], bool] = lambda name, storage: True,
        option_allowed: Callable[[fx.Node, tuple[Strategy, ...]], bool] = lambda node, ways: True,
        memory_limit: float | None = None,
        recomputed: Collection[str] = (),
    ) -> None:
        self.program, self.mesh, self.device, self.pins = program, mesh, device, pins
        self.storage_allowed, self.option_allowed = storage_allowed, option_allowed
        self.moves = Moves(mesh, device)
        self.choices: list[Choice] = []
        self.choice_of: dict[fx.Node, Choice] = {}
        self._group_of: dict[fx.Node, Group] = {}
        self.gradient_of = find_gradients(program)
        self._varying = _varying(program)
        self.needed = _needed_by_backward(program, recomputed)
        self._recomputed = frozenset(recomputed)
        self._storages()
        self._fixed()
        self._groups()
        links = self._links()
        self.problem = Problem([c.block for c in self.choices], links, memory_limit)

    # -- blocks

    def _groups(self) -> None:
        strategies = find_strategies(self.program)
        for groups in share(find_groups(self.program, strategies)):
            first = groups[0]
            options = self._options(first)
            cost = sum((self._node_seconds(n, first, options) for n in first.nodes), np.zeros(1))
            cost = (np.broadcast_to(cost, len(options)) + self._inside(first, options)) * len(
                groups
            )
            backward = first.nodes[-1].meta["phase"] == BACKWARD_PHASE
            memory = self._kept_bytes(groups, options)
            block = Block(first.nodes[-1].meta["name"], cost, memory, cost if backward else None)
            choice = Choice(block, groups, options)
            self.choices.append(choice)
            for group in groups:
                for node in group.nodes:
                    self.choice_of[node], self._group_of[node] = choice, group

    def _options(self, group: Group) -> list[tuple[int, ...]]:
        """Options on the whole mesh: one per dimension, where every value is cut evenly."""
        sizes = self.mesh.sizes
        single = [np.flatnonzero(self._fit(group, _column(group), (size,))) for size in sizes]
        grid = np.meshgrid(*single, indexing="ij")
        found = np.stack([axis.ravel() for axis in grid], axis=1)
        # Mesh dimensions that hold rows of the batch are cut alike: what is stored may still differ.
        data = [axis for axis, name in enumerate(self.mesh.names) if name != TENSOR_PARALLEL]
        found = found[(found[:, data] == found[:, data[:1]]).all(axis=1)] if data else found
        if len(sizes) > 1:
            found = found[self._fit(group, found, sizes)]
        options = [tuple(map(int, option)) for option in found]
        options = [option for option in options if self._is_allowed(group, option)]
        if self._is_small_constant(group):
            whole = [o for o in options if self._is_whole(group, o)]
            options = whole or options
        return options

    def _is_whole(self, group: Group, option: tuple[int, ...]) -> bool:
        ways = [group.options[o] for o in option]
        return all(p == REPLICATE for way in ways for s in way.values() for p in s.outputs)

    def _is_small_constant(self, group: Group) -> bool:
        """What depends on nothing and is small is made whole on every rank, without a thought."""
        if any(node in self._varying for node in group.nodes):
            return False
        return sum(_nbytes(node.meta["val"]) for node in group.nodes) <= _SMALL

    def _is_allowed(self, group: Group, option: tuple[int, ...]) -> bool:
        ways = [group.options[o] for o in option]
        return all(self.option_allowed(n, tuple(way[n] for way in ways)) for n in group.nodes)

    def _fit(self, group: Group, options: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """Which of many options cut every value evenly."""
        good = np.ones(len(options), bool)
        seen = set()
        for node in group.nodes:
            ways = [option[node] for option in group.options]
            values = [argument.meta["val"] for argument in tensor_arguments(node)]
            columns = [(v, tuple(w.inputs[i] for w in ways)) for i, v in enumerate(values)]
            results = results_of(node)
            columns += [(v, tuple(w.outputs[i] for w in ways)) for i, v in enumerate(results)]
            for value, column in columns:
                if not isinstance(value, torch.Tensor) or None in column:
                    continue
                if (value.shape, column) not in seen:
                    seen.add((value.shape, column))
                    good &= _coded(column, options).fits(value.shape, sizes)
            if len(sizes) > 1 and node.target in LOCAL_FORMS:
                cut = np.array([_cuts_rows(node, way) for way in ways])
                good &= cut[options].sum(axis=1) < 2
        return good

    def _node_seconds(
        self, node: fx.Node, group: Group, options: Sequence[tuple[int, ...]]
    ) -> np.ndarray:
        """Time of one operation under each option."""
        if runs_no_kernel(node) or not options:
            return np.zeros(max(1, len(options)))
        ways = [option[node] for option in group.options]
        picked, sizes = np.array(options), np.array(self.mesh.sizes)
        divided = [any(isinstance(p, Shard) for p in (*w.inputs, *w.outputs)) for w in ways]
        work = node_flops(node) / np.where(np.array(divided)[picked], sizes, 1).prod(axis=1)
        reads, writes = node.meta["traffic"]
        result = np.zeros(len(options))
        for i, value in enumerate(results_of(node)):
            if isinstance(value, torch.Tensor):
                result += self._bytes(value, [w.outputs[i] for w in ways], picked)
        moved = result * writes
        for i, (argument, read) in enumerate(zip(tensor_arguments(node), reads, strict=True)):
            if read and isinstance(argument.meta["val"], torch.Tensor):
                size = self._bytes(argument.meta["val"], [w.inputs[i] for w in ways], picked)
                moved += np.minimum(size, result) if i == 0 and looks_up(node) else size
        starts = node.meta.get("starts", True)
        return self.device.seconds(work, moved, matmul_dtype(node), starts)

    def _kept_bytes(
        self, groups: Sequence[Group], options: Sequence[tuple[int, ...]]
    ) -> np.ndarray | None:
        """What all groups of a class keep for the backward; pending sums are kept once they are summed."""
        total = np.zeros(len(options))
        picked = np.array(options).reshape(len(options), len(self.mesh.dims))
        for group in groups:
            for node in group.nodes:
                if node not in self.needed or node.meta["name"] in self._recomputed:
                    continue
                column = [option[node].outputs[0] for option in group.options]
                pending = np.array([isinstance(p, Partial) for p in column])[picked].any(axis=1)
                size = self._bytes(node.meta["val"], column, picked)
                total += np.where(pending, 0.0, size)
        return total if total.any() else None

    def _inside(self, group: Group, options: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Time of what is added up over ranks inside a group."""
        seconds = np.zeros(len(options))
        inside = set(group.nodes)
        edges = [
            (argument, node, i)
            for node in group.nodes
            for i, argument in enumerate(tensor_arguments(node))
            if argument in inside and argument.target is not operator.getitem
        ]
        for number, option in enumerate(options):
            ways = [group.options[o] for o in option]
            changes = set()
            for argument, node, i in edges:
                made = tuple(way[argument].outputs[0] for way in ways)
                wanted = tuple(way[node].inputs[i] for way in ways)
                if made != wanted and node.target is not operator.getitem:
                    changes.add((argument, made, wanted))
            for argument, made, wanted in changes:
                value = argument.meta["val"]
                seconds[number] += self.moves.seconds(tuple(value.shape), value.dtype, made, wanted)
        return seconds

    def _bytes(self, value: torch.Tensor, column: list, options: np.ndarray) -> np.ndarray:
        """Bytes of one rank's part; what an ``expand`` repeats counts once."""
        size = float(value.element_size())
        for length, stride in zip(value.shape, value.stride(), strict=True):
            size *= length if stride else 1
        cut = [isinstance(p, Shard) and value.stride()[p.dim] != 0 for p in column]
        return size / np.where(np.array(cut)[options], np.array(self.mesh.sizes), 1).prod(axis=1)

    def _storages(self) -> None:
        program = self.program
        by_kind: dict[Any, Choice] = {}
        learned = set(self.gradient_of.values())
        states: dict[str, list[tuple[int, ...]]] = {}
        for role, value in zip(program.inputs, program.input_values, strict=True):
            if isinstance(role, roles.OptimizerState) and value.shape:
                states.setdefault(role.owner, []).append((value.dtype.itemsize, *value.shape))
        updates = _update_operations(program)
        for role, value, node in zip(
            program.inputs, program.input_values, program.placeholders, strict=True
        ):
            if not isinstance(role, roles.Param):
                continue
            casts = tuple(user.meta["val"].dtype for user in node.users if _is_cast(user))
            kinds = (
                folded(role.name), value.shape, value.dtype, casts, role.name in learned,
                tuple(states.get(role.name, ())), len(updates.get(role.name, ())),
            )  # fmt: skip
            if kinds not in by_kind:
                by_kind[kinds] = self._storage(role.name, value, node, states, updates, learned)
                self.choices.append(by_kind[kinds])
            choice = by_kind[kinds]
            choice.parameters.append(role.name)
            for user in (node, *(user for user in node.users if _is_cast(user))):
                self.choice_of[user] = choice
        for choice in by_kind.values():
            count = len(choice.parameters)
            choice.block.cost = choice.block.cost * count
            choice.block.memory = choice.block.memory * count  # type: ignore[operator]

    def _storage(self, name, value, node, states, updates, learned) -> Choice:
        shape, choice = value.shape, Choice(Block(name, np.zeros(0)))
        added_up = (role for role in self.program.outputs if isinstance(role, roles.NewAccumulator))
        accumulated = {role.name.removeprefix("grad:") for role in added_up}
        axes = []
        for _ in self.mesh.dims:
            cuts = [Shard(dim) for dim in range(min(len(shape), 2))]
            ways: list[tuple[Placement, Placement]] = [(REPLICATE, REPLICATE)]
            ways += [(cut, cut) for cut in cuts]
            if updates.get(name) or name in accumulated:
                ways += [(REPLICATE, cut) for cut in cuts]
            axes.append(ways)
        cost, memory = [], []
        for combination in itertools.product(*axes):
            storage = Storage(*map(tuple, zip(*combination, strict=True)))
            if not self._storable(shape, storage) or not self.storage_allowed(name, storage):
                continue
            choice.storages.append(storage)
            own = _size(local_shape(shape, storage.stored, self.mesh)) * value.dtype.itemsize
            part = _size(local_shape(shape, storage.updated, self.mesh))
            used = own + (part * value.dtype.itemsize if name in learned else 0)
            for itemsize, *state in states.get(name, ()):
                whole = tuple(state) == tuple(shape)
                used += itemsize * (part if whole else _size(state))
            seconds = self.moves.seconds(shape, value.dtype, storage.updated, storage.stored)
            if storage.stored != storage.updated and REPLICATE not in storage.stored:
                seconds = 0.0
            seconds += self._update_seconds(updates.get(name, ()), part / max(1, _size(shape)))
            for cast in (user for user in node.users if _is_cast(user)):
                size = own + own // value.dtype.itemsize * cast.meta["val"].dtype.itemsize
                seconds += self.device.seconds(0.0, size, value.dtype)
            cost.append(seconds)
            memory.append(used)
        choice.block.cost, choice.block.memory = np.array(cost), np.array(memory, float)
        return choice

    def _storable(self, shape: tuple[int, ...], storage: Storage) -> bool:
        """Even cuts, or rows cut unevenly along one mesh dimension and nothing else."""
        for placements in (storage.stored, storage.updated):
            cuts = [p for p in placements if isinstance(p, Shard)]
            even = Coded([placements]).fits(shape, self.mesh.sizes)[0]
            if cuts and not even and cuts != [Shard(0)]:
                return False
        return True

    def _update_seconds(self, operations: Iterable[fx.Node], part: float) -> float:
        total = 0.0
        for node in operations:
            if runs_no_kernel(node):
                continue
            reads, writes = node.meta["traffic"]
            moved = node.meta["val"].nbytes if writes else 0
            for argument, read in zip(tensor_arguments(node), reads, strict=True):
                moved += argument.meta["val"].nbytes if read else 0
            starts = node.meta.get("starts", True)
            total += self.device.seconds(
                node_flops(node) * part, moved * part, matmul_dtype(node), starts
            )
        return total

    def _fixed(self) -> None:
        """What the outside decides: a block of one option for each placement."""
        self._outside: dict[Placements, Choice] = {}
        for node, role in zip(self.program.placeholders, self.program.inputs, strict=True):
            if node not in self.choice_of:
                self.choice_of[node] = self._pinned(self.pins.get(role, replicated(self.mesh)))
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.choice_of[node] = self._pinned(replicated(self.mesh))

    def _pinned(self, placements: Placements) -> Choice:
        if placements not in self._outside:
            block = Block(f"outside {placements}", np.zeros(1))
            self._outside[placements] = Choice(block, pinned=placements)
            self.choices.append(self._outside[placements])
        return self._outside[placements]

    # -- links

    def _links(self) -> list[Link]:
        kinds: dict[Any, tuple[fx.Node, list, int]] = {}
        for node in self.program.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "call_function"):
                continue
            if node not in self.choice_of or not isinstance(node.meta["val"], torch.Tensor):
                continue
            readers = self._readers(node)
            if not readers:
                continue
            choice = self.choice_of[node]
            keys = tuple(dict.fromkeys((id(c), place, phase) for c, place, phase, _ in readers))
            position = self._position(node)
            key = (id(choice), position, node.meta["val"].shape, node.meta["val"].dtype, keys)
            if key in kinds:
                kinds[key] = (*kinds[key][:2], kinds[key][2] + 1)
            else:
                kinds[key] = (node, readers, 1)
        return [self._link(node, readers, count) for node, readers, count in kinds.values()]

    def _position(self, node: fx.Node) -> int:
        group = self._group_of.get(node)
        return group.nodes.index(node) if group is not None else -1

    def _readers(self, node: fx.Node) -> list[tuple[Choice, Any, int, Any]]:
        """(choice, port, phase, placement of its option number) of each reader outside the own group."""
        found: dict[Any, tuple[Choice, Any, int, Any]] = {}

        def add(choice: Choice, place: Any, phase: int, wants: Any) -> None:
            found.setdefault((id(choice), place, phase), (choice, place, phase, wants))

        own = self._group_of.get(node)
        for user in node.users:
            if user.op == "output":
                for role, result in zip(self.program.outputs, self.program.results, strict=True):
                    if result is node:
                        self._add_result(add, node, role)
            elif decided_here(user):
                group = self._group_of[user]
                if group is own:
                    continue
                choice, index = self.choice_of[user], group.nodes.index(user)
                phase = BACKWARD if user.meta["phase"] == BACKWARD_PHASE else FORWARD
                for i, argument in enumerate(tensor_arguments(user)):
                    if argument is node:
                        add(choice, (index, i), phase, (user, i))
            elif node in self.gradient_of:
                add(self._storage_of(self.gradient_of[node]), "gradient", BACKWARD, "gradient")
            elif (
                user.meta["phase"] == OPTIMIZER
                and node.op == "call_function"
                and not _is_cast(node)
            ):
                add(self._pinned(replicated(self.mesh)), "update", BACKWARD, None)
        return list(found.values())

    def _add_result(self, add: Callable, node: fx.Node, role: roles.Output) -> None:
        if isinstance(role, roles.Grad) and node in self.gradient_of:
            add(self._storage_of(role.name), "gradient", BACKWARD, "gradient")
        elif isinstance(role, roles.NewAccumulator):
            pass  # what is added up stays as it is made
        elif not isinstance(role, (roles.NewParam, roles.NewOptimizerState)):
            phase = BACKWARD if node.meta.get("phase") == BACKWARD_PHASE else FORWARD
            placements = self.pins.get(role, replicated(self.mesh))
            add(self._pinned(placements), ("result", placements), phase, None)

    def _storage_of(self, name: str) -> Choice:
        return next(c for c in self.choices if name in c.parameters)

    def _link(self, node: fx.Node, readers: list, count: int) -> Link:
        choice, value = self.choice_of[node], node.meta["val"]
        made = self._made(node, choice)
        wanted = []
        for reader, _, phase, wants in readers:
            if wants == "gradient":
                placements = [storage.updated for storage in reader.storages]
            elif wants is None:
                placements = [reader.pinned]
            else:
                user, i = wants
                group = self._group_of[user]
                placements = [
                    tuple(group.options[o][user].inputs[i] for o in option)
                    for option in reader.options
                ]
            wanted.append((reader, phase, placements))
        index: dict[Placements, int] = {}
        for placements in (*made, *(p for _, _, ps in wanted for p in ps)):
            index.setdefault(placements, len(index))
        every = list(index)
        once = np.full((len(every), len(every)), np.inf)
        again = np.zeros_like(once)
        rows = sorted({index[p] for p in made})
        seconds = self.moves.table(tuple(value.shape), value.dtype, [every[p] for p in rows], every)
        for row, p in enumerate(rows):
            reduces = [_reduces(every[p], q) for q in every]
            once[p] = np.where(reduces | np.isinf(seconds[row]), seconds[row], 0.0) * count
            again[p] = np.where(np.isinf(once[p]) | reduces, 0.0, seconds[row]) * count
        kept = None
        if node in self.needed:
            parts = [_parts(placements, self.mesh) for placements in every]
            kept = np.array([count * value.nbytes / part for part in parts])
        return Link(
            node.meta.get("name", node.name),
            choice.block,
            np.array([index[p] for p in made]),
            [Reader(r.block, np.array([index[p] for p in ps]), phase) for r, phase, ps in wanted],
            once,
            again,
            hidden=self.device.overlaps and any(w == "gradient" for *_, w in readers),
            kept=kept,
        )

    def _made(self, node: fx.Node, choice: Choice) -> list[Placements]:
        if choice.pinned is not None:
            return [choice.pinned]
        if choice.parameters:
            return [storage.stored for storage in choice.storages]
        group = self._group_of[node]
        return [
            tuple(group.options[o][node].outputs[0] for o in option)  # type: ignore[misc]
            for option in choice.options
        ]


def _parts(placements: Placements, mesh: MeshShape) -> int:
    cuts = zip(placements, mesh.sizes, strict=True)
    return _size(ranks for placement, ranks in cuts if isinstance(placement, Shard))


def _needed_by_backward(program: Program, recomputed: Collection[str]) -> set[fx.Node]:
    """Forward values that the backward reads, or what it recomputes from; a view stands for its source."""
    needed: set[fx.Node] = set()
    dropped = frozenset(recomputed)
    stack = [
        source
        for node in program.operations(BACKWARD_PHASE)
        for source in node.all_input_nodes
        if source.op == "call_function" and source.meta["phase"] != BACKWARD_PHASE
    ]
    while stack:
        node = stack.pop()
        viewed_node = viewed(node)
        if viewed_node is not None:
            stack += [viewed_node] if viewed_node.op == "call_function" else []
        elif node not in needed and isinstance(node.meta["val"], torch.Tensor):
            needed.add(node)
            if node.meta["name"] in dropped:
                stack += [n for n in node.all_input_nodes if n.op == "call_function"]
    return needed


def _reduces(have: Placements, want: Placements) -> bool:
    """Whether a change adds up a pending sum; what only gathers is gathered again for the backward."""
    return any(isinstance(p, Partial) and p != q for p, q in zip(have, want, strict=True))


def _parameter_of(role: roles.Output) -> str | None:
    """The parameter whose gradient an output is, or is made of."""
    match role:
        case roles.Grad(name) | roles.NewParam(name):
            return name
        case roles.NewAccumulator(name) if name.startswith("grad:"):
            return name.removeprefix("grad:")
    return None


def find_gradients(program: Program) -> dict[fx.Node, str]:
    """Values of the backward that are a parameter's gradient, still to be reduced -> the parameter."""
    found: dict[fx.Node, str] = {}
    for role, result in zip(program.outputs, program.results, strict=True):
        name = _parameter_of(role)
        if name is None:
            continue
        shape = result.meta["val"].shape
        seen: set[fx.Node] = set()
        stack = [result]
        while stack:
            node = stack.pop()
            value = node.meta.get("val")
            same = isinstance(value, torch.Tensor) and value.shape == shape
            if node in seen or node.op != "call_function" or not same:
                continue
            seen.add(node)
            if decided_here(node):
                found[node] = name
            else:
                stack += node.all_input_nodes
    return found


_SMALL = 32 * 2**20


def _varying(program: Program) -> set[fx.Node]:
    """Values that depend on a parameter or the batch."""
    kinds = (roles.Param, roles.UserInput, roles.ResultTangent)
    rows = zip(program.placeholders, program.inputs, strict=True)
    found = {node for node, role in rows if isinstance(role, kinds)}
    for node in program.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _nbytes(value: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))


def _update_operations(program: Program) -> dict[str, list[fx.Node]]:
    """Operations of the update on values of a parameter's shape, by parameter."""
    found: dict[str, list[fx.Node]] = {}
    for role, result in zip(program.outputs, program.results, strict=True):
        if not isinstance(role, (roles.NewParam, roles.NewOptimizerState)):
            continue
        name = role.name if isinstance(role, roles.NewParam) else role.owner
        known = found.setdefault(name, [])
        stack = [result]
        while stack:
            node = stack.pop()
            value = node.meta.get("val")
            if node.op != "call_function" or decided_here(node) or node in known:
                continue
            if _is_cast(node) or not isinstance(value, torch.Tensor) or not value.dim():
                continue
            known.append(node)
            stack += node.all_input_nodes
    return found


def _is_cast(node: fx.Node) -> bool:
    return bool(node.meta.get("casts_parameter"))


def _column(group: Group) -> np.ndarray:
    return np.arange(len(group.options))[:, None]


def _coded(column: Sequence[Placement], options: np.ndarray) -> Coded:
    """A value's placements under options: ``column`` has that of each option of one mesh dimension."""
    return Coded([(placement,) for placement in column]).at(options)


def _cuts_rows(node: fx.Node, way: Strategy) -> bool:
    placements = ([(p,) for p in part] for part in (way.inputs, way.outputs))
    return rows_cut(node, *placements) is not None  # type: ignore[arg-type]


def _size(shape: Iterable[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
