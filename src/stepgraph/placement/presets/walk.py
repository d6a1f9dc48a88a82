"""A walk over a Program along one mesh dimension: every value gets a placement there.

Operations are placed in order: each takes the cheapest of its rules' strategies
(:mod:`stepgraph.operators.sharding`), where cost is a kind of parallelism's own say. Then, in reverse,
values made of constants are cut where they are made.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators.sharding import Rules, Strategy
from stepgraph.program import roles
from stepgraph.program.layout import InnerShard
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, OPTIMIZER, Program, tensor_arguments, tensors_of

REPLICATE, SUM = Replicate(), Partial("sum")


# Tags of operations that work on shards of any size, padding included.
_ELEMENTWISE = ("accumulates", "reduced_before", "accumulated_next")


class Walk(abc.ABC):
    """One kind of parallelism along one mesh dimension.

    Args:
        program: with global shapes, not placed yet.
        ranks: along this mesh dimension.
        unit: what a sharded dimension must divide by.
        others: ranks along other mesh dimensions that may cut the blocks of an InnerShard. (None of data
            parallelism's: its dimensions cut alike, and tensor parallelism never cuts rows of activations.)

    After :meth:`decide`, ``chosen`` has a Strategy per operation, ``inputs`` and ``outputs`` a placement
    per role, ``unruled`` the operations that no rule could place.
    """

    def __init__(self, program: Program, ranks: int, unit: int, others: int = 1) -> None:
        self.program, self.ranks, self.unit = program, ranks, unit
        self.rules = Rules(ranks, unit, others)
        self.inputs: dict[roles.Input, Placement] = {}
        self.role_of = dict(zip(program.placeholders, program.inputs, strict=True))
        self.tangents = [
            (node, role)
            for node, role in self.role_of.items()
            if isinstance(role, roles.ResultTangent)
        ]
        self.outputs: dict[roles.Output, Placement] = {}
        self.unruled: dict[str, str] = {}
        self.chosen: dict[fx.Node, Strategy] = {}
        self.now: dict[fx.Node, tuple[Placement | None, ...]] = {}
        self.in_update: dict[fx.Node, Placement] = {}
        self.from_batch: set[fx.Node] = set()
        self.cut_by_some: dict[fx.Node, Placement] = {}
        self.casts: dict[fx.Node, Placement] = {}

    @abc.abstractmethod
    def stored(self, role: roles.Input, shape: tuple[int, ...]) -> Placement:
        """Where an input lives between steps."""

    @abc.abstractmethod
    def in_model(self, role: roles.Input, stored: Placement) -> Placement:
        """Where the forward and the backward read an input."""

    @abc.abstractmethod
    def crossing(self, node: fx.Node) -> Placement:
        """Where the update reads a value of the forward or the backward: a gradient, mostly."""

    @abc.abstractmethod
    def updated(self, role: roles.Param, shape: tuple[int, ...]) -> Placement:
        """Where the update reads a parameter, and leaves its gradient."""

    @abc.abstractmethod
    def cost(
        self,
        node: fx.Node,
        arguments: Sequence[fx.Node],
        placements: Sequence[Placement],
        strategy: Strategy,
    ) -> float:
        """What a strategy costs where the arguments are placed as given; infinite: never."""

    def decide(self) -> Walk:
        """Places everything."""
        self.place_inputs()
        self.walk()
        self.finish()
        return self

    def finish(self) -> None:
        """What follows from the strategies: constants, outputs."""
        self._shard_constants_at_their_source()
        self._place_outputs()

    def place_inputs(self) -> None:
        """Inputs as stored, and as read."""
        rows = zip(
            self.program.placeholders, self.program.inputs, self.program.input_values, strict=True
        )
        for node, role, value in rows:
            if isinstance(role, roles.ResultTangent):
                continue  # when the result is placed
            stored = self.inputs[role] = self.stored(role, value.shape)
            self.now[node] = (self.in_model(role, stored),)
            if isinstance(role, roles.Param):
                self.in_update[node] = self.updated(role, value.shape)
            if isinstance(role, roles.UserInput):
                self.from_batch.add(node)

    def walk(self) -> None:
        """Places every operation, in order."""
        self.unruled.clear()
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.now[node] = (REPLICATE,)
            elif node.op == "call_function":
                if meta(node)["phase"] != FORWARD:
                    self.place_tangents()
                self.place(node)

    def place_tangents(self) -> None:
        """What comes back for a result is placed like the result."""
        for node, role in self.tangents:
            if role not in self.inputs:
                result = self.program.result(roles.ModuleResult(role.index))
                self.inputs[role] = self.returned(result)
                self.now[node] = (self.inputs[role],)

    def returned(self, node: fx.Node) -> Placement:
        """Where a module's result goes to its caller."""
        return REPLICATE

    def placement_of(self, argument: fx.Node, reader: fx.Node) -> Placement:
        """Where a reader finds a value."""
        if meta(reader)["phase"] == OPTIMIZER:
            if argument in self.in_update:
                return self.in_update[argument]
            if argument.op == "call_function" and meta(argument)["phase"] != OPTIMIZER:
                return self.crossing(argument)
        if self.reduced_before(reader):
            return self.crossing(argument)
        if argument in self.casts:
            return self.casts[argument]
        return self.cut_by_some.get(argument) or self.now[argument][0] or REPLICATE

    def reduced_before(self, node: fx.Node) -> bool:
        """Whether an operation of the backward reads a gradient that is reduced already."""
        return "reduced_before" in meta(node)

    def _place_cast(self, node: fx.Node, parameter: fx.Node) -> None:
        """A parameter is cast where it is stored; readers find it as they would the parameter."""
        stored = self.inputs[self.role_of[parameter]]
        self.chosen[node], self.now[node] = Strategy((stored,), (stored,)), (stored,)
        self.casts[node] = self.now[parameter][0] or REPLICATE

    def offers(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
        """The strategies to choose from."""
        return self.rules.strategies(node, placements)

    def place(self, node: fx.Node) -> None:
        """Chooses an operation's strategy."""
        arguments = tensor_arguments(node)
        if meta(node).get("casts_parameter"):
            self._place_cast(node, arguments[0])
            return
        if any(argument in self.from_batch for argument in arguments):
            self.from_batch.add(node)
        if node.target.__name__ == "getitem":  # type: ignore[union-attr]
            placement = self.now[arguments[0]][node.args[1]]  # type: ignore[index]
            self.now[node] = (placement,)
            self.chosen[node] = Strategy((placement or REPLICATE,), (placement,))
            return
        placements = tuple(self.placement_of(argument, node) for argument in arguments)
        strategies = self.offers(node, placements)
        if meta(node)["phase"] == OPTIMIZER or any(tag in meta(node) for tag in _ELEMENTWISE):
            strategies = [*self.rules.element_by_element(node, placements), *strategies]
        best = min(strategies, key=lambda s: self.cost(node, arguments, placements, s))
        self.chosen[node] = best
        self.now[node] = best.outputs
        replicates = all(isinstance(p, Replicate) for p in best.inputs)
        gathers = any(isinstance(placement, Shard) for placement in placements)
        if replicates and gathers and len(strategies) == 1:
            self.unruled[meta(node)["name"]] = str(node.target)

    def cut_through(self, node: fx.Node, target: Shard) -> list[tuple[fx.Node, Placement]]:
        """How the argument of a view would be cut, were its result cut as ``target``."""
        arguments = tensor_arguments(node)
        if len(arguments) != 1 or not isinstance(meta(arguments[0])["val"], torch.Tensor):
            return []
        for dim in range(meta(arguments[0])["val"].dim()):
            cut = Strategy((Shard(dim),), (target,))
            if cut in self.rules.strategies(node, cut.inputs):
                return [(arguments[0], cut.inputs[0])]
        return []

    def _shard_constants_at_their_source(self) -> None:
        """A constant that every reader cuts is made cut: a mask, or a gradient of ones, costs n-th."""
        results = set(self.program.results)
        for node in reversed(list(self.program.graph.nodes)):
            constant = node not in self.from_batch or node in self.cut_by_some
            if node not in self.chosen or not constant or node in results:
                continue
            if self.now[node] != (REPLICATE,) or not isinstance(meta(node)["val"], torch.Tensor):
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
        if not isinstance(meta(argument)["val"], torch.Tensor):
            return REPLICATE  # several results, of which one is read
        if isinstance(target, InnerShard):
            return target if meta(argument)["val"].shape == meta(node)["val"].shape else REPLICATE
        own = target.dim - (meta(node)["val"].dim() - meta(argument)["val"].dim())
        value = meta(argument)["val"]
        fits = 0 <= own < value.dim() and value.shape[own] == meta(node)["val"].shape[target.dim]
        return Shard(own) if fits else REPLICATE

    def _place_outputs(self) -> None:
        params = {role.name: role for role in self.program.inputs if isinstance(role, roles.Param)}
        rows = zip(
            self.program.outputs, self.program.results, self.program.output_values, strict=True
        )
        for role, node, value in rows:
            written = roles.written_input(role)
            if written is not None and written in self.inputs:
                self.outputs[role] = self.inputs[written]
            elif isinstance(role, roles.Grad):
                self.outputs[role] = self.updated(params[role.name], value.shape)
            elif isinstance(role, roles.ModuleResult):
                self.outputs[role] = self.returned(node)
            else:
                self.outputs[role] = REPLICATE


def redistribution_bytes(value: object, have: Placement, want: Placement, ranks: int) -> float:
    """Bytes that one rank sends to change a placement; a local cut costs a thousandth of its bytes."""
    if have == want:
        return 0.0
    size = size_in_bytes(value)
    if isinstance(have, Replicate):
        return 1e-3 * size if isinstance(want, Shard) else float("inf")
    if isinstance(want, Partial):
        averages = isinstance(have, Partial) and (have.reduce_op, want.reduce_op) == ("avg", "sum")
        return 1e-3 * size if averages else float("inf")
    # A mesh of one rank moves nothing; cost it as two, so that its plan is the same kind of plan.
    ranks = max(ranks, 2)
    share = size * (ranks - 1) / ranks
    if isinstance(have, InnerShard) or (isinstance(have, Shard) and isinstance(want, InnerShard)):
        return share  # by way of the whole
    if isinstance(have, Partial):
        return share if isinstance(want, Shard) else 2 * share
    return share if isinstance(want, Replicate) else share / ranks


def size_in_bytes(value: object) -> int:
    """Of a value, or of all tensors in a tuple."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))
