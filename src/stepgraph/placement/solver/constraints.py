"""What a user asks of ``auto``: placements of inputs, parameters and values; presets on mesh dimensions."""

import fnmatch
from collections.abc import Hashable, Mapping
from typing import Any

from torch import fx

from stepgraph.errors import UsageError, near_misses
from stepgraph.operators.entries import Strategy
from stepgraph.placement.presets.beside_data import BESIDE_DATA
from stepgraph.placement.presets.data_parallel import PRESETS
from stepgraph.placement.presets.named import check_preset, walk_along
from stepgraph.placement.presets.walk import Walk, shapes_of
from stepgraph.placement.rules.coded import Coded
from stepgraph.placement.solver.groups import Group
from stepgraph.placement.solver.storages import Storage
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.planning.placements import parse_placements
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements, data_mesh, show
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program

_INPUT, _OUTPUT = "input:", "/output"


class Constraints:
    """Constraints on the placements of one Program.

    Args:
        asked: pattern -> placements. ``input:labels`` is a batch leaf, ``layers.*.weight`` parameters,
            ``layers.*.mlp/output`` what a module returns, any other stable name that operation's result;
            the name of a mesh dimension maps to a preset.
        known: where other programs of the step store inputs, by label.

    Raises:
        UsageError: a pattern that matches nothing, placements that are none or do not divide.
    """

    def __init__(
        self,
        asked: Mapping[str, str],
        program: Program,
        mesh: MeshShape,
        known: Mapping[str, Placements],
    ) -> None:
        self.program, self.mesh, self.known, self.free = program, mesh, known, not asked
        self.shapes = shapes_of(program)
        self.inputs: dict[roles.Input, Placements] = {}
        self.stored: dict[str, Placements] = {}
        self.made: dict[fx.Node, Placements] = {}
        self.walks: dict[int, Walk] = {}
        first = {role.dim for role in BESIDE_DATA}
        for pattern, wanted in sorted(asked.items(), key=lambda item: item[0] not in first):
            if pattern in mesh.names:
                self._preset(mesh.names.index(pattern), wanted)
            elif pattern.startswith(_INPUT):
                self._input(pattern, _parse(pattern, wanted, mesh))
            else:
                self._named(pattern, _parse(pattern, wanted, mesh))

    def _preset(self, axis: int, name: str) -> None:
        dim, size = self.mesh.dims[axis]
        beside = BESIDE_DATA.get(self.mesh.roles[axis])
        known = [n for n in PRESETS if len(PRESETS[n]) == 1]
        if beside:
            known = list(dict.fromkeys([beside.words[0], "+".join(beside.words)]))
        if name not in known:
            raise UsageError(
                f"constraint {dim!r}: {name!r} is no preset for this mesh dimension",
                do=near_misses(name, known),
            )
        check_preset(name, MeshShape(((dim, size),)) if beside else data_mesh(size))
        others = [walk for a, walk in self.walks.items() if self.mesh.roles[a] in BESIDE_DATA]
        self.walks[axis] = walk_along(self.program, self.mesh, axis, name, *others[:1])

    def _input(self, pattern: str, wanted: Placements) -> None:
        names = {r.name: r for r in self.program.inputs if isinstance(r, roles.UserInput)}
        found = fnmatch.filter(names, pattern.removeprefix(_INPUT))
        if not found:
            raise UsageError(
                f"constraint {pattern!r} names no leaf of the batch",
                do=near_misses(pattern, [_INPUT + name for name in names]),
            )
        for name in found:
            value = self.program.input_values[self.program.inputs.index(names[name])]
            self._check_even(pattern, name, value.shape, wanted)
            self.inputs[names[name]] = wanted

    def _named(self, pattern: str, wanted: Placements) -> None:
        shapes, nodes = self.shapes, _results(self.program)
        parameters = fnmatch.filter(shapes, pattern)
        values = fnmatch.filter(nodes, pattern)
        if not parameters and not values:
            raise UsageError(
                f"constraint {pattern!r} names no parameter, no module's output and no operation",
                do=near_misses(pattern, [*shapes, *nodes]),
            )
        for name in parameters:
            self._check_even(pattern, name, shapes[name], wanted)
            self.stored[name] = wanted
        for name in values:
            self._check_even(pattern, name, meta(nodes[name])["val"].shape, wanted)
            self.made[nodes[name]] = wanted

    def admits(self, decision: PlacementDecision) -> bool:
        """Whether placements that were decided without them are as they ask."""
        inputs = {roles.label(role): wanted for role, wanted in self.inputs.items()}
        inputs |= {roles.label(roles.Param(name)): wanted for name, wanted in self.stored.items()}
        made = {meta(node)["name"]: wanted for node, wanted in self.made.items()}
        return (
            all(decision.inputs.get(label) == wanted for label, wanted in inputs.items())
            and all(
                name in decision.operations and decision.operations[name].outputs[0] == wanted
                for name, wanted in made.items()
            )
            and all(self._follows(decision, axis, walk) for axis, walk in self.walks.items())
        )

    def _follows(self, decision: PlacementDecision, axis: int, walk: Walk) -> bool:
        """Whether what a walk stores and makes is so along its mesh dimension."""
        stored = all(
            decision.inputs[roles.label(role)][axis] == placement
            for role, placement in walk.inputs.items()
        )
        return stored and all(
            placed is None or placed[axis] == wanted
            for node, strategy in walk.chosen.items()
            if (operation := decision.operations.get(meta(node)["name"])) is not None
            for placed, wanted in zip(operation.outputs, strategy.outputs, strict=True)
        )

    def _check_even(self, pattern: str, name: str, shape: Any, wanted: Placements) -> None:
        if not Coded([wanted]).fits(tuple(shape), self.mesh.sizes)[0]:
            raise UsageError(
                f"constraint {pattern!r}: {name} of shape {list(shape)} cannot be placed {show(wanted)}",
                why=f"its dimensions do not divide so on the mesh {self.mesh}",
                do="pin another dimension, or choose another mesh",
            )

    def allows(self, name: str, storage: Storage) -> bool:
        """Whether a parameter may be stored so."""
        stored = self.known.get(f"Param({name})"), self.stored.get(name)
        updated = self.known.get(f"Accumulator(grad:{name})")
        if any(p not in (None, storage.stored) for p in stored):
            return False
        if updated not in (None, storage.updated):
            return False
        return all(
            walk.inputs[roles.Param(name)] == storage.stored[axis]
            and walk.kind.updated(name, self.shapes[name]) == storage.updated[axis]
            for axis, walk in self.walks.items()
        )

    def extra_options(self, group: Group) -> list[dict[fx.Node, Strategy]]:
        """What presets do with a group, where that is not among its own options."""
        found: list[dict[fx.Node, Strategy]] = []
        for walk in self.walks.values():
            option = {node: walk.chosen[node] for node in group.nodes}
            if option not in group.options and option not in found:
                found.append(option)
        return found

    def apart(self, group: Group) -> Hashable:
        """Differs for groups of which something else is asked."""
        return tuple(
            (self.made.get(node), *(walk.chosen[node] for walk in self.walks.values()))
            for node in group.nodes
        )

    def allows_option(self, node: fx.Node, ways: tuple[Strategy, ...]) -> bool:
        """Whether an operation may be placed so."""
        wanted = self.made.get(node)
        if wanted is not None and tuple(way.outputs[0] for way in ways) != wanted:
            return False
        return all(ways[axis] == walk.chosen[node] for axis, walk in self.walks.items())


def _parse(pattern: str, wanted: str, mesh: MeshShape) -> Placements:
    try:
        placements = parse_placements(wanted)
    except ValueError as error:
        raise UsageError(
            f"constraint {pattern!r}: {wanted!r} are no placements",
            why=str(error),
            do="write one per mesh dimension, as in S(0)R",
        ) from error
    if len(placements) != len(mesh.dims):
        raise UsageError(
            f"constraint {pattern!r}: {wanted!r} has {len(placements)} placements, the mesh {mesh} has "
            f"{len(mesh.dims)} dimensions",
            do="write one per mesh dimension, as in S(0)R",
        )
    return placements


def _results(program: Program) -> dict[str, fx.Node]:
    """Operations by stable name, and under ``module/output`` the last one of each module's forward."""
    found: dict[str, fx.Node] = {}
    for node in program.operations():
        found[meta(node)["name"]] = node
        if meta(node)["phase"] == FORWARD:
            path = meta(node).get("module", "")
            while path:
                found[path + _OUTPUT] = node
                path = path.rpartition(".")[0]
    return found
