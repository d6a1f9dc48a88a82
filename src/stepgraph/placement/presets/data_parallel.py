"""Data parallelism along one mesh dimension: the batch is divided, gradients are reduced.

Activations are sharded on the batch, parameters are whole where they are used, and every gradient
leaves the backward as a pending sum that is reduced once. The operations' placements come from the
rules (:mod:`stepgraph.operators.sharding`), but the choice among them is ours: an activation is never
communicated where a rule lets it stay, and work on the batch is never repeated on every rank where a
rule lets it be divided.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators.sharding import Strategy
from stepgraph.placement.presets.walk import (
    REPLICATE,
    SUM,
    Walk,
    redistribution_bytes,
    size_in_bytes,
)
from stepgraph.placement.presets.zero_stages import Storage
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, tensor_arguments, tensors_of


class DataParallel(Walk):
    """The batch is cut, parameters are whole where the model reads them.

    Args:
        storage: what is sharded between uses.
        unit: ranks along all data-parallel dimensions.
        taken: names of parameters, and gradients on their way into the update, whose dimension 0 another
            kind of parallelism cuts: dimension 1 is cut here.
    """

    def __init__(
        self,
        program: Program,
        ranks: int,
        unit: int,
        storage: Storage,
        taken: frozenset = frozenset(),
    ) -> None:
        super().__init__(program, ranks, unit)
        self.storage, self.taken = storage, taken

    def decide(self) -> DataParallel:
        """Places everything; what has the batch's shape is found on the way."""
        self.place_inputs()
        while True:
            self.walk()
            found = self._constants_cut_by_some()
            if found.keys() <= self.cut_by_some.keys():
                break
            self.cut_by_some |= found
            self.from_batch |= found.keys()
        self.finish()
        return self

    def stored(self, role: roles.Input, shape: tuple[int, ...]) -> Placement:
        """Parameters and states by the preset, the batch by rows."""
        storage = self.storage
        match role:
            case roles.Param(name):
                return self._cut(storage.shard_parameters, name, shape)
            case roles.GivenGrad(name):
                return self._cut(storage.shard_optimizer, name, shape)
            case roles.OptimizerState(owner):
                return self._cut(storage.shard_optimizer, owner, shape)
            case roles.UserInput():
                divides = bool(shape) and shape[0] % self.unit == 0
                return Shard(0) if divides else REPLICATE
            case roles.Accumulator(name) if name.startswith("grad:"):
                if storage.accumulate_sharded:
                    return self._cut(storage.shard_optimizer, name.removeprefix("grad:"), shape)
                return SUM
            case roles.Accumulator():
                return SUM
        return REPLICATE

    def _cut(self, wanted: bool, parameter: object, shape: tuple[int, ...]) -> Placement:
        dim = 1 if parameter in self.taken else 0
        return Shard(dim) if wanted and len(shape) > dim else REPLICATE

    def in_model(self, role: roles.Input, stored: Placement) -> Placement:
        """Parameters are whole where the model uses them."""
        return REPLICATE if isinstance(role, roles.Param) else stored

    def updated(self, role: roles.Param, shape: tuple[int, ...]) -> Placement:
        """As the optimizer's states are stored."""
        return self._cut(self.storage.shard_optimizer, role.name, shape)

    def returned(self, node: fx.Node) -> Placement:
        """This rank's rows, if the result has any."""
        placement = self.now[node][0]
        return placement if isinstance(placement, Shard) else REPLICATE

    def reduced_before(self, node: fx.Node) -> bool:
        """Also for an accumulator that is sharded."""
        each = self.storage.accumulate_sharded and "accumulated_next" in meta(node)
        return each or super().reduced_before(node)

    def crossing(self, node: fx.Node) -> Placement:
        """Reduced on the way into the update, once."""
        value = meta(node)["val"]
        if not isinstance(value, torch.Tensor):
            return self.now[node][0] or REPLICATE
        return self._cut(self.storage.shard_optimizer, node, tuple(value.shape))

    def _constants_cut_by_some(self) -> dict[fx.Node, Placement]:
        """Constants that one reader cuts and another reads whole: they have the batch's shape.

        The gradient of a sum is ones; its readers must not work on the whole batch on every rank.
        """
        wanted: dict[fx.Node, set[Placement]] = {}
        for node, strategy in self.chosen.items():
            if meta(node)["phase"] != OPTIMIZER:
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
            for argument, placement in self.cut_through(node, cuts[0]):
                wanted[argument].add(placement)
        return found

    def offers(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
        """A constant that some cut is made cut that way, or whole: random numbers could be in any."""
        strategies = super().offers(node, placements)
        wanted = ((self.cut_by_some.get(node),), (REPLICATE,))
        fitting = [strategy for strategy in strategies if strategy.outputs in wanted]
        return fitting if node in self.cut_by_some and fitting else strategies

    def cost(
        self,
        node: fx.Node,
        arguments: Sequence[fx.Node],
        placements: Sequence[Placement],
        strategy: Strategy,
    ) -> float:
        """Bytes moved between ranks, plus a little for bytes touched and work done on every rank."""
        cost = 0.0
        for argument, have, want in zip(arguments, placements, strategy.inputs, strict=True):
            joins = meta(node).get("accumulates") and want == SUM and have != SUM
            if joins:  # a gradient that is whole, or cut, already: zero on all ranks but one
                have, want = SUM, REPLICATE
            cost += redistribution_bytes(meta(argument)["val"], have, want, self.ranks)
        # A preset may want the update done on every rank; work on the batch never.
        update = meta(node)["phase"] == OPTIMIZER or self.reduced_before(node)
        repeated = node in self.from_batch and not update
        if repeated and not any(isinstance(p, Shard) for p in strategy.outputs):
            if any(isinstance(p, Partial) for p in strategy.outputs):
                return cost
            cost += 1e-2 * sum(size_in_bytes(value) for value in tensors_of(meta(node)["val"]))
            cost += 1e-2 * sum(size_in_bytes(meta(argument)["val"]) for argument in arguments)
        return cost


def ranks_that_divide(program: Program) -> int:
    """The fewest ranks that divide the rows of a batch; 1: it has one row, and none do."""
    rows = [
        value.shape[0]
        for role, value in zip(program.inputs, program.input_values, strict=True)
        if isinstance(role, roles.UserInput) and value.shape
    ]
    usual = statistics.mode(rows) if rows else 1
    return next((ranks for ranks in range(2, usual + 1) if usual % ranks == 0), 1)
