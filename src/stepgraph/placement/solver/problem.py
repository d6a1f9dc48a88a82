"""From a Program to an optimisation: blocks and links, with what they cost on a device.

Every class of groups (:mod:`stepgraph.placement.solver.groups`) is a block, every parameter's storage
another, what the outside says (a batch, a loss) a block of one option. Every value that one block reads
from another is a link. Costs are those of one rank: roofline times of operations on their parts, and times
of collectives.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from stepgraph.cost.devices import Device
from stepgraph.operators.attention import is_saved_inside
from stepgraph.operators.entries import Strategy
from stepgraph.placement.rules.redistribution import Cost, Moves
from stepgraph.placement.solver.candidates import find_strategies
from stepgraph.placement.solver.choices import (
    BACKWARD,
    FORWARD,
    Block,
    Link,
    Phases,
    Problem,
    Reader,
)
from stepgraph.placement.solver.constraints import Constraints
from stepgraph.placement.solver.dataflow import decided_here, find_gradients, is_stored_cast
from stepgraph.placement.solver.groups import Group, find_groups, share
from stepgraph.placement.solver.hiding import Hidden, Hiding
from stepgraph.placement.solver.options import Options
from stepgraph.placement.solver.storages import Storage, Storages
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements, replicated
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD as BACKWARD_PHASE
from stepgraph.program.program import OPTIMIZER, Program, tensor_arguments

REPLICATE = Replicate()
# Seconds: the backward of an attention that is placed otherwise than its forward cannot read what a fused
# kernel saved, and holds all scores.
_UNFUSED = 1.0

# In which placement a value is made, and those that its own group has turned it into, for all.
_Made = tuple[Placements, frozenset[Placements]]
_NONE: frozenset[Placements] = frozenset()


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
        asked: what a user asks, and other programs of the step have decided.
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
        asked: Constraints,
        memory_limit: float | None = None,
        recomputed: Collection[str] = (),
    ) -> None:
        self.program, self.mesh, self.pins, self.asked = program, mesh, pins, asked
        self.moves = Moves(mesh, device)
        self.choices: list[Choice] = []
        self.choice_of: dict[fx.Node, Choice] = {}
        self._group_of: dict[fx.Node, Group] = {}
        self.gradient_of = find_gradients(program)
        self.ways = Options(program, self.moves, recomputed, asked.free)
        self.hiding = Hiding(program, self.moves, self.ways, self.gradient_of)
        self._storages()
        self._fixed()
        self._groups()
        links = self._links()
        self.problem = Problem([c.block for c in self.choices], links, memory_limit)

    # -- blocks

    def _groups(self) -> None:
        strategies = find_strategies(self.program)
        found = find_groups(self.program, strategies)
        for group in found:
            group.options += self.asked.extra_options(group)
        least: dict[fx.Node, float] = {}
        for groups in share(found, self.asked.apart):
            first = groups[0]
            options = self.ways.of(first, len(groups))
            if not self.asked.free:
                options = [o for o in options if all(self._is_allowed(g, o) for g in groups)]
            inside = self.ways.inside(first, options)
            cost = self.ways.seconds(groups, options, inside)
            memory = self.ways.kept_bytes(groups, options, inside)
            last = [group.nodes[-1] for group in groups]
            later = self.hiding.later(last, begins=False)
            temporary = self.ways.temporary_bytes(first, options, inside)
            block = Block(meta(last[0])["name"], cost, memory, later, temporary)
            choice = Choice(block, groups, options)
            self.choices.append(choice)
            if options:
                least |= dict.fromkeys(last, float(cost.min()) / len(groups))
            for group in groups:
                for node in group.nodes:
                    self.choice_of[node], self._group_of[node] = choice, group
        self.hiding.takes(least)

    def _is_allowed(self, group: Group, option: tuple[int, ...]) -> bool:
        ways = [group.options[o] for o in option]
        return all(self.asked.allows_option(n, tuple(way[n] for way in ways)) for n in group.nodes)

    def _storages(self) -> None:
        self._storage_of: dict[str, Choice] = {}
        learned = set(self.gradient_of.values())
        for stored in Storages(self.program, self.moves, learned).find():
            names, count = stored.parameters, len(stored.parameters)
            allowed = [all(self.asked.allows(n, way) for n in names) for way in stored.ways]
            kept = np.flatnonzero(allowed)
            cost, memory = np.array(stored.cost)[kept], np.array(stored.memory)[kept]
            choice = Choice(
                Block(names[0], cost * count, memory * count),
                parameters=names,
                storages=[stored.ways[i] for i in kept],
            )
            self.choices.append(choice)
            self._storage_of |= dict.fromkeys(names, choice)
            for node in stored.nodes:
                self.choice_of[node] = choice

    def _fixed(self) -> None:
        """What the outside decides: a block of one option for each placement."""
        self._outside: dict[Placements, Choice] = {}
        for role, node, _ in self.program.input_rows:
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
        kinds: dict[Any, tuple[list[fx.Node], list]] = {}
        for node in self.program.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "call_function"):
                continue
            if node not in self.choice_of or not isinstance(meta(node)["val"], torch.Tensor):
                continue
            readers = self._readers(node)
            if not readers:
                continue
            choice = self.choice_of[node]
            keys = tuple(dict.fromkeys((id(c), place, phase) for c, place, phase, _ in readers))
            group = self._group_of.get(node)
            position = -1 if group is None else group.nodes.index(node)
            key = (id(choice), position, meta(node)["val"].shape, meta(node)["val"].dtype, keys)
            kinds.setdefault(key, ([], readers))[0].append(node)
        return [self._link(nodes, readers) for nodes, readers in kinds.values()]

    def _readers(self, node: fx.Node) -> list[tuple[Choice, Any, Phases, Any]]:
        """(choice, port, phases, placement of its option number) of each reader outside the own group."""
        found: dict[Any, tuple[Choice, Any, Phases, Any]] = {}

        def add(choice: Choice, place: Any, phases: Phases, wants: Any) -> None:
            found.setdefault((id(choice), place, phases), (choice, place, phases, wants))

        own = self._group_of.get(node)
        for user in node.users:
            if user.op == "output":
                for role, result, _ in self.program.output_rows:
                    if result is node:
                        self._add_result(add, node, role)
            elif decided_here(user):
                group = self._group_of[user]
                if group is own:
                    continue
                choice, index = self.choice_of[user], group.nodes.index(user)
                for i, argument in enumerate(tensor_arguments(user)):
                    if argument is node:
                        add(choice, (index, i), self._phases(user), (user, i))
            elif node in self.gradient_of:
                add(self._storage_of[self.gradient_of[node]], "gradient", (BACKWARD,), "gradient")
            elif (
                meta(user)["phase"] == OPTIMIZER
                and node.op == "call_function"
                and not is_stored_cast(node)
            ):
                add(self._pinned(replicated(self.mesh)), "update", (BACKWARD,), None)
        return list(found.values())

    def _add_result(self, add: Callable, node: fx.Node, role: roles.Output) -> None:
        if isinstance(role, roles.Grad) and node in self.gradient_of:
            add(self._storage_of[role.name], "gradient", (BACKWARD,), "gradient")
        elif isinstance(role, roles.NewAccumulator):
            pass  # what is added up stays as it is made
        elif not isinstance(role, (roles.NewParam, roles.NewOptimizerState)):
            placements = self.pins.get(role, replicated(self.mesh))
            add(self._pinned(placements), ("result", placements), self._phases(node), None)

    def _phases(self, node: fx.Node) -> Phases:
        if meta(node).get("phase") == BACKWARD_PHASE:
            return (BACKWARD,)
        return (FORWARD, BACKWARD) if self.ways.runs_again(node) else (FORWARD,)

    def _link(self, nodes: list[fx.Node], readers: list) -> Link:
        node, count = nodes[0], len(nodes)
        choice, value = self.choice_of[node], meta(node)["val"]
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
        index: dict[_Made, int] = {}
        for known in (*made, *((p, _NONE) for _, _, ps in wanted for p in ps)):
            index.setdefault(known, len(index))
        every = list(index)
        once = np.full((len(every), len(every)), np.inf)
        again, kept, temporary = (np.zeros_like(once) for _ in range(3))
        wires, last = (np.zeros((2, *once.shape)) for _ in range(2))
        stays = node in self.ways.needed
        apart = _UNFUSED if is_saved_inside(node) else 0.0
        is_gradient = any(isinstance(wants, str) for *_, wants in readers)
        merged = is_gradient
        shape, strides = tuple(value.shape), value.stride()
        rows = sorted({index[p] for p in made})
        columns = sorted({index[p, _NONE] for *_, ps in wanted for p in ps})
        found: dict[tuple[int, int], Cost] = {}
        for p in rows:
            have, paid = every[p]
            for q in columns:
                want, _ = every[q]
                if want in paid:
                    once[p, q] = 0.0
                else:
                    found[p, q] = self.moves.cost(shape, value.dtype, have, want, strides, merged)
        if found:
            here, costs = tuple(np.array([*found]).T), found.values()
            moves = np.array([every[p][0] != every[q][0] for p, q in found])
            once[here] = count * (np.array([cost.once for cost in costs]) + apart * moves)
            again[here] = count * np.array([cost.again for cost in costs])
            temporary[here] = [cost.temporary for cost in costs]
            kept[here] = count * np.array([cost.kept for cost in costs]) if stays else 0
            wires[:, *here] = count * np.array([cost.wires for cost in costs]).T
            last[:, *here] = count * np.array([cost.last for cost in costs]).T
        hidden: Hidden = {}
        if meta(node).get("phase") == BACKWARD_PHASE:
            once, again = once + again, np.zeros_like(again)  # it is read in one phase alone
            hidden = self.hiding.of_backward(nodes, last, wires, is_gradient)
        elif node in self._group_of and any(isinstance(x, Partial) for p, _ in made for x in p):
            own = self._group_of[node].nodes
            hidden = self.hiding.of_forward(nodes, last, np.where(again > 0, 0.0, once), own)
        name, makes = meta(node).get("name", node.name), np.array([index[p] for p in made])
        reading = [
            Reader(r.block, np.array([index[p, _NONE] for p in ps]), phase)
            for r, phase, ps in wanted
        ]
        sizes = {"kept": kept, "temporary": temporary}
        return Link(name, choice.block, makes, reading, once, again, **sizes, **hidden)

    def _made(self, node: fx.Node, choice: Choice) -> list[_Made]:
        if choice.pinned is not None:
            return [(choice.pinned, _NONE)]
        if choice.parameters:
            return [(storage.stored, _NONE) for storage in choice.storages]
        group = self._group_of[node]
        inside = [
            (reader, i)
            for value, reader, i in group.edges()
            if value is node and reader.target is not operator.getitem
        ]
        made: list[_Made] = []
        for option in choice.options:
            ways = [group.options[o] for o in option]
            placements = tuple(way[node].outputs[0] for way in ways)
            taken = {tuple(way[reader].inputs[i] for way in ways) for reader, i in inside}
            made.append((placements, frozenset(taken - {placements})))  # type: ignore[arg-type]
        return made
