"""``auto``: the placement that costs least on a device, by its cost model.

What is decided in the forward and the backward is an integer program
(:mod:`stepgraph.placement.solver.problem`, :mod:`stepgraph.placement.solver.optimise`); the update follows
from where gradients, parameters and states are stored, by the same walk that places it for a preset.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.cost.devices import Device
from stepgraph.cost.traffic import assign_traffic
from stepgraph.errors import BudgetError, UsageError
from stepgraph.operators.entries import Strategy
from stepgraph.operators.sharding import Rules
from stepgraph.placement.presets.data_parallel import (
    WHOLE,
    ZERO3,
    data_parallel,
    walk_data_parallel,
)
from stepgraph.placement.presets.named import record
from stepgraph.placement.presets.walk import REPLICATE, Kind, Walk
from stepgraph.placement.solver.choices import Problem, Solution, runners_up
from stepgraph.placement.solver.constraints import Constraints
from stepgraph.placement.solver.held_bytes import least_bytes
from stepgraph.placement.solver.optimise import InfeasibleError, Search
from stepgraph.placement.solver.problem import Choice, Model
from stepgraph.placement.solver.room import Room
from stepgraph.placement.solver.storages import Storage
from stepgraph.planning.decisions import PlacementDecision, PlacementDraft, Reason
from stepgraph.planning.request import AUTO
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements, show
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

SECONDS, GAP = 60.0, 0.001  # of one solution; a smaller gap is not looked for


def decide_automatically(
    program: Program,
    mesh: MeshShape,
    device: Device,
    known: Mapping[str, Placements] | None = None,
    constraints: Mapping[str, str] | None = None,
    room: Room | None = None,
    recomputed: Collection[str] = (),
) -> PlacementDecision:
    """Places every value of a Program so that a step takes least time.

    Args:
        program: with global shapes, each reader with views of its own, not placed yet.
        device: whose costs count.
        known: where other programs of the step store inputs, by label.
        constraints: as ``stepgraph.plan`` takes them.
        room: what may be held.
        recomputed: stable names of forward operations that are not kept for the backward.

    Returns:
        the decision, with the reason of each choice and the gap that is certified.

    Raises:
        UsageError: a constraint that names nothing, or that cannot be had.
        BudgetError: parameters, gradients and states do not fit the limit however they are sharded.
    """
    room, known = room or Room(), known or {}
    limit = None if room.limit is None else float(room.limit)
    if limit is not None and limit < (least := least_bytes(program, mesh.world_size, recomputed)):
        raise _too_small(least, limit, mesh)
    key = program.name, limit is None, tuple(recomputed), tuple(known.items())
    if key not in room.solvers:
        asked = Constraints(constraints or {}, program, mesh, known)
        room.solvers[key] = _Solver(program, mesh, device, asked, limit, recomputed)
    return room.solvers[key].within(limit, room)


class _Solver:
    """Places a Program within one limit after another."""

    def __init__(
        self,
        program: Program,
        mesh: MeshShape,
        device: Device,
        asked: Constraints,
        limit: float | None,
        recomputed: Collection[str],
    ) -> None:
        if any("traffic" not in meta(node) for node in program.operations()):
            assign_traffic(program, fused=True)
        self.program, self.mesh = program, mesh
        self.pins = {**_pins(program, mesh), **asked.inputs}
        self.model = Model(program, mesh, device, self.pins, asked, limit, recomputed)
        for choice in self.model.choices:
            if not len(choice.block.cost):
                name = choice.parameters[0] if choice.parameters else choice.block.name
                raise UsageError(
                    f"no placement of {name!r} satisfies all constraints",
                    do="drop one of them; what an operation can do is in its rules",
                )
        self.search: Search | None = None

    def within(self, limit: float | None, room: Room) -> PlacementDecision:
        """As :func:`decide_automatically` has it."""
        if self.search is None or not self.search.begins_near(limit):
            self.search = Search(replace(self.model.problem, memory_limit=limit), GAP)
        try:
            solution = self.search.within(limit, SECONDS, room.hasty, room.says_least)
        except InfeasibleError as error:
            self.search = None  # where it ended is far from what fits more
            if math.isinf(error.least):
                raise UsageError(
                    "no placement satisfies all constraints together",
                    why="a value that is pinned cannot become what its readers can take",
                    do="drop one of them; what an operation can do is in its rules",
                ) from error
            raise _too_small(error.least, limit or 0.0, self.mesh) from error
        decision = PlacementDraft(AUTO, optimality_gap=solution.gap, views_apart=True)
        decision.held_bytes = int(self.model.problem.memory(solution.chosen))
        walks = _walks(self.program, self.mesh, self.model, solution, self.pins)
        record(self.program, walks, decision)
        decision.reasons = _reasons(self.search.problem, self.model.choices, solution)
        return decision.decision()


def _too_small(least: float, limit: float, mesh: MeshShape) -> BudgetError:
    error = BudgetError(
        f"parameters, gradients, optimizer states and activations take {least / 2**30:.2f} GiB a "
        "rank at least",
        where=f"mesh {mesh}",
        why=f"{limit / 2**30:.2f} GiB are left for them",
        do="give a larger budget, or more ranks",
    )
    error.least = math.ceil(least)
    return error


def _pins(program: Program, mesh: MeshShape) -> dict[Any, Placements]:
    """What Engine gives and takes: a rank passes its rows, and gets those of a module's results back."""
    pins: dict[Any, Placements] = {}
    for role, _, value in program.input_rows:
        if isinstance(role, roles.UserInput):
            divides = bool(value.shape) and value.shape[0] % mesh.data_size == 0
            pins[role] = _where_rows_differ(mesh, Shard(0) if divides else REPLICATE)
            pins[roles.InputGrad(role.index)] = pins[role]
    results = [role for role in program.outputs if isinstance(role, roles.ModuleResult)]
    if results:
        walk = walk_data_parallel(program, mesh.data_size, mesh.data_size, WHOLE)
        for role in results:
            pins[role] = _where_rows_differ(mesh, walk.outputs[role])
            pins[roles.ResultTangent(role.index)] = pins[role]
    return pins


def _where_rows_differ(mesh: MeshShape, rows: Placement) -> Placements:
    return tuple(rows if role.divides_batch else REPLICATE for role in mesh.roles)


def _walks(
    program: Program,
    mesh: MeshShape,
    model: Model,
    solution: Solution,
    pins: Mapping[Any, Placements],
) -> list[Walk]:
    """Walks along all mesh dimensions on which forward and backward are decided: the update follows."""
    storages: dict[str, Storage] = {}
    solved: dict[fx.Node, tuple[Strategy, ...]] = {}
    for choice, option in zip(model.choices, solution.chosen, strict=True):
        storages |= {name: choice.storages[option] for name in choice.parameters}
        for group in choice.groups:
            solved |= choice.strategies(group, option)
    gradients = dict(model.gradient_of)
    for node in program.operations():  # what is cast behind its reduction
        reduced = "reduced_before" in meta(node) or "accumulated_next" in meta(node)
        if reduced and node.all_input_nodes and node.all_input_nodes[-1] in gradients:
            gradients[node] = gradients[node.all_input_nodes[-1]]
    walks = []
    for axis in range(len(mesh.dims)):
        given = {node: ways[axis] for node, ways in solved.items()}
        kind = _as_solved(program, mesh, axis, gradients, storages, pins)
        walk = Walk(program, kind, Rules(mesh.sizes[axis], mesh.data_size), given)
        walk.place_operations()
        walk.place_outputs()
        walks.append(walk)
    return walks


def _as_solved(
    program: Program,
    mesh: MeshShape,
    axis: int,
    gradients: Mapping[fx.Node, str],
    storages: Mapping[str, Storage],
    pins: Mapping[Any, Placements],
) -> Kind:
    """Inputs, results and gradients are where the solution, or another program of the step, has them."""
    base = data_parallel(mesh.data_size, ZERO3)

    def updated(name: str, shape: tuple[int, ...]) -> Placement:
        placement = storages[name].updated[axis]
        outside = isinstance(placement, Shard) and placement.dim >= len(shape)
        return REPLICATE if outside else placement

    def stored(role: roles.Input, shape: tuple[int, ...]) -> Placement:
        match role:
            case roles.Param(name) if name in storages:
                return storages[name].stored[axis]
            case roles.GivenGrad(name) | roles.OptimizerState(name) if name in storages:
                return updated(name, shape)
            case roles.Accumulator(name) if name.removeprefix("grad:") in storages:
                return updated(name.removeprefix("grad:"), shape)
            case roles.Accumulator():
                return base.stored(role, shape)
        return pins[role][axis] if role in pins else REPLICATE

    def crossing(walk: Walk, node: fx.Node) -> Placement:
        """A gradient is reduced to where its parameter is updated; anything else is whole."""
        if node in gradients:
            return updated(gradients[node], tuple(meta(node)["val"].shape))
        return REPLICATE

    def returned(walk: Walk, node: fx.Node) -> Placement:
        return pins[program.outputs[program.results.index(node)]][axis]

    return replace(
        base, stored=stored, updated=updated, crossing=crossing, returned=returned, gathers=False
    )


def _reasons(problem: Problem, choices: Sequence[Choice], solution: Solution) -> dict[str, Reason]:
    """Per value what was chosen, the runner-up, and what each costs, in ms of one rank."""
    reasons: dict[str, Reason] = {}
    others = runners_up(problem, solution.chosen)
    rows = zip(choices, solution.chosen, others, strict=True)
    for choice, option, (cost, other, its_cost) in rows:
        count = max(1, len(choice.groups), len(choice.parameters))
        named = {} if other is None else _named(choice, other)
        for name, ways in _named(choice, option).items():
            reasons[name] = Reason(
                ways,
                round(cost / count * 1e3, 6),
                named.get(name),
                None if other is None else round(its_cost / count * 1e3, 6),
            )
    return reasons


def _named(choice: Choice, option: int) -> dict[str, str]:
    """What an option means for each value of a block: its placements, as text."""
    if choice.storages:
        storage = choice.storages[option]
        text = show(storage.stored)
        if storage.stored != storage.updated:
            text += f", updated {show(storage.updated)}"
        return {f"Param({name})": text for name in choice.parameters}
    if not choice.groups:
        return {}
    texts = [
        show(tuple(way.outputs[0] or REPLICATE for way in ways))
        for ways in choice.strategies(choice.groups[0], option).values()
    ]
    return {
        meta(node)["name"]: text
        for group in choice.groups
        for node, text in zip(group.nodes, texts, strict=True)
    }
