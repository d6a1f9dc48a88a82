"""The named placement presets: ``ddp``, ``zero1``, ``zero2``, ``zero3``.

A preset says where parameters, gradients and optimizer states are stored; everything else follows:
activations are sharded on the batch, parameters are whole where they are used, and every gradient
leaves the backward as a pending sum that is reduced once. The operations' placements come from the
rules (:mod:`stepgraph.placement.rules`), but the choice among them is ours: an activation is never
communicated where a rule lets it stay, and work on the batch is never repeated on every rank where a
rule lets it be divided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.errors import MeshError, UsageError, near_misses
from stepgraph.placement.rules import Rules, Strategy, tensor_arguments
from stepgraph.planning.decisions import OperationPlacement, PlacementDecision
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, Placements
from stepgraph.program.program import OPTIMIZER, Program, tensors_of

REPLICATE, SUM = Replicate(), Partial("sum")


@dataclass(frozen=True)
class Preset:
    """Where a preset stores things along the data-parallel dimension: sharded, or on every rank.

    ``accumulate_sharded``: with micro-batches, reduce each one's gradients into a sharded
    accumulator, instead of once at the end.
    """

    shard_parameters: bool
    shard_optimizer: bool
    accumulate_sharded: bool


PRESETS = {
    "ddp": Preset(False, False, False),
    "zero1": Preset(False, True, False),
    "zero2": Preset(False, True, True),
    "zero3": Preset(True, True, True),
}


def check_preset(name: str, mesh: MeshShape) -> Preset:
    """The preset of a name, if the mesh has what it needs.

    Raises:
        UsageError: unknown name; the message lists the known ones.
        MeshError: the mesh lacks a dimension.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown plan {name!r}", do=near_misses(name, PRESETS))
    if mesh.names != ("dp",):
        raise MeshError(
            f"preset {name!r} places values on a mesh of one dimension 'dp', the mesh is {mesh}",
            do=f"use mesh='dp={mesh.world_size}'",
        )
    return PRESETS[name]


def stored_parameter(preset_name: str, shape: tuple[int, ...], mesh: MeshShape) -> Placements:
    """Where a preset stores a parameter of a global shape."""
    preset = check_preset(preset_name, mesh)
    placement = Shard(0) if preset.shard_parameters and shape else REPLICATE
    return (placement,) * len(mesh.dims)


def decide(program: Program, mesh: MeshShape, preset_name: str) -> PlacementDecision:
    """Places every value of a Program by a preset.

    Args:
        program: with global shapes, not placed yet.
        mesh: one dimension, ``dp``.
        preset_name: a key of :data:`PRESETS`.

    Returns:
        the decision, in the model's own names.
    """
    preset = check_preset(preset_name, mesh)
    return _DataParallel(program, mesh, preset_name, preset).decide()


class _DataParallel:
    """One walk over the program in order, then one in reverse for values made of constants."""

    def __init__(self, program: Program, mesh: MeshShape, name: str, preset: Preset) -> None:
        self.program, self.mesh, self.preset = program, mesh, preset
        self.ranks = mesh.world_size
        self.rules = Rules(self.ranks)
        self.decision = PlacementDecision(name)
        self.chosen: dict[fx.Node, Strategy] = {}
        self.now: dict[fx.Node, tuple[Placement | None, ...]] = {}
        self.in_update: dict[fx.Node, Placement] = {}
        self.from_batch: set[fx.Node] = set()
        self.cut_by_some: dict[fx.Node, Placement] = {}

    def decide(self) -> PlacementDecision:
        self._place_inputs()
        self._pin_gradients()
        while True:
            self._walk()
            found = self._constants_cut_by_some()
            if found.keys() <= self.cut_by_some.keys():
                break
            self.cut_by_some |= found
            self.from_batch |= found.keys()
        self._shard_constants_at_their_source()
        self._record()
        return self.decision

    # -- inputs and outputs

    def _update_placement(self, shape: tuple[int, ...]) -> Placement:
        """Where a tensor of the update (gradient, optimizer state, new value) lives."""
        return Shard(0) if self.preset.shard_optimizer and shape else REPLICATE

    def _stored(self, role: roles.Input, shape: tuple[int, ...]) -> Placement:
        match role:
            case roles.Param():
                return stored_parameter(self.decision.preset, shape, self.mesh)[0]
            case roles.OptimizerState():
                return self._update_placement(shape)
            case roles.UserInput():
                divides = bool(shape) and shape[0] % self.ranks == 0
                return Shard(0) if divides else REPLICATE
            case roles.Accumulator(name) if name.startswith("grad:"):
                return self._update_placement(shape) if self.preset.accumulate_sharded else SUM
            case roles.Accumulator():
                return SUM
        return REPLICATE

    def _place_inputs(self) -> None:
        rows = zip(
            self.program.placeholders, self.program.inputs, self.program.input_values, strict=True
        )
        for node, role, value in rows:
            stored = self._stored(role, value.shape)
            self.decision.inputs[roles.label(role)] = self._on_mesh(stored)
            # Parameters are whole where the model uses them, and as stored in the update.
            self.now[node] = (REPLICATE if isinstance(role, roles.Param) else stored,)
            if isinstance(role, roles.Param):
                self.in_update[node] = self._update_placement(value.shape)
            if isinstance(role, roles.UserInput):
                self.from_batch.add(node)

    def _pin_gradients(self) -> None:
        """A value that crosses from the backward into the update is reduced on the way, once."""
        for node in self.program.operations():
            if node.meta["phase"] == OPTIMIZER:
                continue
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and any(
                user.op == "call_function" and user.meta["phase"] == OPTIMIZER
                for user in node.users
            ):
                self.in_update[node] = self._update_placement(tuple(value.shape))

    # -- operations

    def _placement_of(self, argument: fx.Node, reader: fx.Node) -> Placement:
        if reader.meta["phase"] == OPTIMIZER and argument in self.in_update:
            return self.in_update[argument]
        return self.cut_by_some.get(argument) or self.now[argument][0] or REPLICATE

    def _walk(self) -> None:
        self.decision.unruled.clear()
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.now[node] = (REPLICATE,)
            elif node.op == "call_function":
                self._place(node)

    def _constants_cut_by_some(self) -> dict[fx.Node, Placement]:
        """Constants that one reader cuts and another reads whole: they have the batch's shape.

        The gradient of a sum is ones; its readers must not work on the whole batch on every rank.
        """
        wanted: dict[fx.Node, set[Placement]] = {}
        for node, strategy in self.chosen.items():
            if node.meta["phase"] != OPTIMIZER:
                for argument, placement in zip(
                    tensor_arguments(node), strategy.inputs, strict=True
                ):
                    wanted.setdefault(argument, set()).add(placement)
        found = {}
        for node in reversed(self.chosen):
            cuts = [kind for kind in wanted.get(node, ()) if isinstance(kind, Shard)]
            if len(cuts) != 1 or self.now[node] != (REPLICATE,) or node in self.from_batch:
                continue
            if len(wanted[node]) > 1:
                found[node] = cuts[0]
            for argument, placement in self._cut_through(node, cuts[0]):
                wanted[argument].add(placement)
        return found

    def _cut_through(self, node: fx.Node, target: Shard) -> list[tuple[fx.Node, Placement]]:
        """How the argument of a view would be cut, were its result cut as ``target``."""
        arguments = tensor_arguments(node)
        if len(arguments) != 1 or not isinstance(arguments[0].meta["val"], torch.Tensor):
            return []
        for dim in range(arguments[0].meta["val"].dim()):
            cut = Strategy((Shard(dim),), (target,))
            if cut in self.rules.strategies(node, cut.inputs):
                return [(arguments[0], cut.inputs[0])]
        return []

    def _place(self, node: fx.Node) -> None:
        arguments = tensor_arguments(node)
        if any(argument in self.from_batch for argument in arguments):
            self.from_batch.add(node)
        if node.target.__name__ == "getitem":  # type: ignore[union-attr]
            placement = self.now[arguments[0]][node.args[1]]  # type: ignore[index]
            self.now[node] = (placement,)
            self.chosen[node] = Strategy((placement or REPLICATE,), (placement,))
            return
        placements = tuple(self._placement_of(argument, node) for argument in arguments)
        strategies = self.rules.strategies(node, placements)
        if node.meta["phase"] == OPTIMIZER or node.meta.get("accumulates"):
            strategies = [*self.rules.element_by_element(node), *strategies]
        best = min(strategies, key=lambda s: self._cost(node, arguments, placements, s))
        self.chosen[node] = best
        self.now[node] = best.outputs
        replicates = all(isinstance(p, Replicate) for p in best.inputs)
        communicates = any(
            p != q and not isinstance(p, Replicate)
            for p, q in zip(placements, best.inputs, strict=True)
        )
        if replicates and communicates and len(strategies) == 1:
            self.decision.unruled[node.meta["name"]] = str(node.target)

    def _cost(self, node, arguments, placements, strategy: Strategy) -> float:
        """Bytes moved between ranks, plus a little for bytes touched and work done on every rank."""
        cost = 0.0
        for argument, have, want in zip(arguments, placements, strategy.inputs, strict=True):
            joins = node.meta.get("accumulates") and want == SUM and have != SUM
            if joins:  # a gradient that is whole, or cut, already: zero on all ranks but one
                have, want = SUM, REPLICATE
            cost += redistribution_bytes(argument.meta["val"], have, want, self.ranks)
        # A preset may want the update done on every rank; work on the batch never.
        repeated = node in self.from_batch and node.meta["phase"] != OPTIMIZER
        if repeated and not any(isinstance(p, Shard) for p in strategy.outputs):
            if any(isinstance(p, Partial) for p in strategy.outputs):
                return cost
            cost += 1e-2 * sum(_bytes(value) for value in tensors_of(node.meta["val"]))
            cost += 1e-2 * sum(_bytes(argument.meta["val"]) for argument in arguments)
        return cost

    def _shard_constants_at_their_source(self) -> None:
        """A constant that every reader cuts is made cut: a mask, or a gradient of ones, costs n-th."""
        results = set(self.program.results)
        for node in reversed(list(self.program.graph.nodes)):
            constant = node not in self.from_batch or node in self.cut_by_some
            if node not in self.chosen or not constant or node in results:
                continue
            if self.now[node] != (REPLICATE,) or not isinstance(node.meta["val"], torch.Tensor):
                continue
            wanted = {
                self.chosen[user].inputs[position]
                for user in node.users
                for position, argument in enumerate(tensor_arguments(user))
                if argument is node
            }
            if len(wanted) != 1 or not isinstance(target := next(iter(wanted)), Shard):
                continue
            arguments = tensor_arguments(node)
            have = tuple(self.now[argument][0] or REPLICATE for argument in arguments)
            cut = tuple(self._cut_like(argument, node, target) for argument in arguments)
            for strategy in self.rules.strategies(node, cut):
                free = all(
                    h == w or isinstance(h, Replicate)
                    for h, w in zip(have, strategy.inputs, strict=True)
                )
                if free and strategy.outputs == (target,):
                    self.chosen[node], self.now[node] = strategy, strategy.outputs
                    break

    def _cut_like(self, argument: fx.Node, node: fx.Node, target: Shard) -> Placement:
        """The same cut on an argument that broadcasting aligns at the right, if it can be had."""
        own = target.dim - (node.meta["val"].dim() - argument.meta["val"].dim())
        value = argument.meta["val"]
        fits = 0 <= own < value.dim() and value.shape[own] == node.meta["val"].shape[target.dim]
        return Shard(own) if fits else REPLICATE

    # -- the decision

    def _on_mesh(self, placement: Placement | None) -> Placements:
        return (placement or REPLICATE,) * len(self.mesh.dims)

    def _record(self) -> None:
        for node, strategy in self.chosen.items():
            self.decision.operations[node.meta["name"]] = OperationPlacement(
                tuple(self._on_mesh(p) for p in strategy.inputs),
                tuple(None if p is None else self._on_mesh(p) for p in strategy.outputs),
            )
        rows = zip(
            self.program.results, self.program.outputs, self.program.output_values, strict=True
        )
        for _, role, value in rows:
            written = roles.written_input(role)
            if written is not None and roles.label(written) in self.decision.inputs:
                placements = self.decision.inputs[roles.label(written)]
            elif isinstance(role, roles.Grad):
                placements = self._on_mesh(self._update_placement(value.shape))
            else:
                placements = self._on_mesh(REPLICATE)
            self.decision.outputs[roles.label(role)] = placements


def redistribution_bytes(value: object, have: Placement, want: Placement, ranks: int) -> float:
    """Bytes that one rank sends to change a placement; a local cut costs a thousandth of its bytes."""
    if have == want:
        return 0.0
    size = _bytes(value)
    if isinstance(have, Replicate):
        return 1e-3 * size if isinstance(want, Shard) else float("inf")
    if isinstance(want, Partial):
        averages = isinstance(have, Partial) and (have.reduce_op, want.reduce_op) == ("avg", "sum")
        return 1e-3 * size if averages else float("inf")
    # A mesh of one rank moves nothing; cost it as two, so that its plan is the same kind of plan.
    ranks = max(ranks, 2)
    share = size * (ranks - 1) / ranks
    if isinstance(have, Partial):
        return share if isinstance(want, Shard) else 2 * share
    return share if isinstance(want, Replicate) else share / ranks


def _bytes(value: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))
