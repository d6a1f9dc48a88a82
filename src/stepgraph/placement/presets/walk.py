"""A walk over a Program along one mesh dimension: every value gets a placement there.

Operations are placed in order: each takes the cheapest of its rules' strategies
(:mod:`stepgraph.operators.sharding`), where cost is a kind of parallelism's own say. Then, in reverse,
values made of constants are sharded where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.cost.work import size_in_bytes
from stepgraph.operators.entries import Strategy
from stepgraph.operators.every_way import of_kind
from stepgraph.operators.own import is_own
from stepgraph.operators.sharding import Rules
from stepgraph.placement.presets.whole_matrices import whole_in_update
from stepgraph.program import roles
from stepgraph.program.build import freeze
from stepgraph.program.layout import InnerShard, blocks_of
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, OPTIMIZER, PHASES, Program, tensor_arguments

REPLICATE, SUM = Replicate(), Partial("sum")

# An argument of an operation, the placement that it has, and the one that a strategy wants it in.
Read = tuple[fx.Node, Placement, Placement]

# Tags of operations that work on shards of any size, padding included.
_ELEMENTWISE = ("accumulates", "reduced_before", "accumulated_next")
# Those with which an operation of an update is placed by more than what it reads.
_SETS_APART = (*_ELEMENTWISE, "padding_is_zero")


def rules_alone(walk: Walk, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """What the rules say."""
    return walk.rules.strategies(node, placements)


@dataclass(frozen=True)
class Kind:
    """One kind of parallelism: what it decides along a mesh dimension, seeing what a walk has placed.

    ``stored(role, shape)``: where an input lives between steps. ``updated(parameter, shape)``: where the
    update reads a parameter, and leaves its gradient. ``crossing(walk, node)``: where the update reads a
    value of the forward or the backward: a gradient, mostly. ``cost(walk, node, strategy, reads)``:
    infinite: never. ``returned(walk, node)``: where a module's result goes to its caller.
    ``offers(walk, node, placements)``: the strategies to choose from. ``sees(walk, node)``: all that costs
    and offers follow from beside the operation and where it finds its arguments; in an update, nothing.
    ``gathers``: the model reads parameters whole, else as they are stored. ``reduces_each``: accumulators
    of gradients are sharded.
    """

    stored: Callable[[roles.Input, tuple[int, ...]], Placement]
    updated: Callable[[str, tuple[int, ...]], Placement]
    crossing: Callable[[Walk, fx.Node], Placement]
    cost: Callable[[Walk, fx.Node, Strategy, Sequence[Read]], float]
    sees: Callable[[Walk, fx.Node], Hashable]
    returned: Callable[[Walk, fx.Node], Placement] = lambda walk, node: REPLICATE
    offers: Callable[[Walk, fx.Node, tuple[Placement, ...]], list[Strategy]] = rules_alone
    gathers: bool = False
    reduces_each: bool = False


class Walk:
    """What is placed along one mesh dimension: inputs at once, then operations, then outputs.

    ``chosen`` has a Strategy per operation, ``now`` where its results are, ``inputs`` and ``outputs`` a
    placement per role, ``unruled`` the operations that no rule could place.

    Args:
        program: with global shapes, not placed yet.
        rules: for the ranks along this mesh dimension.
        given: strategies of operations that are decided already.
    """

    def __init__(
        self,
        program: Program,
        kind: Kind,
        rules: Rules,
        given: Mapping[fx.Node, Strategy] | None = None,
    ) -> None:
        self.program, self.kind, self.rules, self.given = program, kind, rules, given or {}
        self.role_of = {node: role for role, node, _ in program.input_rows}
        self.tangents = [
            (n, r) for n, r in self.role_of.items() if isinstance(r, roles.ResultTangent)
        ]
        self.inputs: dict[roles.Input, Placement] = {}
        self.outputs: dict[roles.Output, Placement] = {}
        self.unruled: dict[str, str] = {}
        self.chosen: dict[fx.Node, Strategy] = {}
        self.now: dict[fx.Node, tuple[Placement | None, ...]] = {}
        self.in_update: dict[fx.Node, Placement] = {}
        self.from_batch: set[fx.Node] = set()
        self.sharded_for_some: dict[fx.Node, Placement] = {}  # constants of the batch's shape
        self.casts: dict[fx.Node, Placement] = {}
        self.rows_in_blocks: set[str] = set()  # parameters whose rows are read in slices of blocks
        self._known: dict[tuple, tuple[Strategy, bool]] = {}
        self.whole = whole_in_update(program)
        for role, node, value in program.input_rows:
            if isinstance(role, roles.ResultTangent):
                continue  # when the result is placed
            stored = self.inputs[role] = kind.stored(role, value.shape)
            self.now[node] = (stored,)
            if isinstance(role, roles.Param):
                self.now[node] = (REPLICATE if kind.gathers else stored,)
                self.in_update[node] = kind.updated(role.name, value.shape)
            elif isinstance(role, roles.UserInput):
                self.from_batch.add(node)

    def place_operations(self, phases: Sequence[str] = PHASES) -> None:
        """Places the operations of some phases, in order."""
        self.unruled.clear()
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.now[node] = (REPLICATE,)
            elif node.op == "call_function" and meta(node)["phase"] in phases:
                if meta(node)["phase"] != FORWARD:
                    self._place_tangents()
                self._place(node)

    def _place_tangents(self) -> None:
        """What comes back for a result is placed like the result."""
        for node, role in self.tangents:
            if role not in self.inputs:
                result = self.program.result(roles.ModuleResult(role.index))
                self.inputs[role] = self.kind.returned(self, result)
                self.now[node] = (self.inputs[role],)

    def placement_of(self, argument: fx.Node, reader: fx.Node) -> Placement:
        """Where a reader finds a value."""
        if meta(reader)["phase"] == OPTIMIZER:
            if argument in self.in_update:
                return self.in_update[argument]
            if argument.op == "call_function" and meta(argument)["phase"] != OPTIMIZER:
                return self.kind.crossing(self, argument)
        if self.reduced_before(reader):
            return self.kind.crossing(self, argument)
        if argument in self.casts:
            return self.casts[argument]
        return self.sharded_for_some.get(argument) or self.now[argument][0] or REPLICATE

    def reduced_before(self, node: fx.Node) -> bool:
        """Whether an operation of the backward reads a gradient that is reduced already."""
        tags = meta(node)
        return "reduced_before" in tags or (self.kind.reduces_each and "accumulated_next" in tags)

    def _place(self, node: fx.Node) -> None:
        """Chooses an operation's strategy."""
        arguments = tensor_arguments(node)
        if node in self.given:
            self._choose(node, self.given[node])
            wanted = self.given[node].inputs
            if is_own(node.target) and len(self.rules.strategies(node, wanted)) == 1:
                self.unruled[meta(node)["name"]] = str(node.target)
            return
        if node in self.whole:
            made = meta(node)["val"]
            results = len(made) if isinstance(made, (tuple, list)) else 1
            self._choose(node, Strategy((REPLICATE,) * len(arguments), (REPLICATE,) * results))
            return
        if meta(node).get("casts_parameter"):
            # Where the parameter is stored; readers find it as they would the parameter.
            stored = self.inputs[self.role_of[arguments[0]]]
            self._choose(node, Strategy((stored,), (stored,)))
            self.casts[node] = self.now[arguments[0]][0] or REPLICATE
            return
        if any(argument in self.from_batch for argument in arguments):
            self.from_batch.add(node)
        if node.target.__name__ == "getitem":  # type: ignore[union-attr]
            placement = self.now[arguments[0]][node.args[1]]  # type: ignore[index]
            self._choose(node, Strategy((placement or REPLICATE,), (placement,)))
            return
        placements = tuple(self.placement_of(argument, node) for argument in arguments)
        key = self._known_as(node, placements)
        found = self._known.get(key) if key else None
        if found is None:
            found = self._cheapest(node, arguments, placements)
            if key:
                self._known[key] = found
        best, is_unruled = found
        self._choose(node, best)
        if is_unruled:
            self.unruled[meta(node)["name"]] = str(node.target)

    def _known_as(self, node: fx.Node, placements: tuple[Placement, ...]) -> tuple:
        """What the choice follows from, which repeats for every layer, and every parameter; or nothing."""
        tags = meta(node)
        if node in self.sharded_for_some or any(tag in tags for tag in _SETS_APART):
            return ()
        update = tags["phase"] == OPTIMIZER
        if update and self.kind.offers is not rules_alone:
            return ()
        seen = None if update else self.kind.sees(self, node)
        return node.target, freeze(node.args), freeze(node.kwargs), placements, tags["phase"], seen

    def _cheapest(
        self, node: fx.Node, arguments: list[fx.Node], placements: tuple[Placement, ...]
    ) -> tuple[Strategy, bool]:
        """The strategy that costs least; and whether there is but one, which gathers everything."""
        strategies = self.kind.offers(self, node, placements)
        if node in self.sharded_for_some:  # made so, or whole: random numbers could be in any way
            wanted = ((self.sharded_for_some[node],), (REPLICATE,))
            strategies = [s for s in strategies if s.outputs in wanted] or strategies
        if meta(node)["phase"] == OPTIMIZER or any(tag in meta(node) for tag in _ELEMENTWISE):
            strategies = [*self.rules.element_by_element(node, placements), *strategies]

        def cost(strategy: Strategy) -> float:
            reads = [*zip(arguments, placements, strategy.inputs, strict=True)]
            return self.kind.cost(self, node, strategy, reads)

        best = min(strategies, key=cost)
        replicates = all(isinstance(p, Replicate) for p in best.inputs)
        gathers = any(isinstance(placement, Shard) for placement in placements)
        return best, replicates and gathers and len(strategies) == 1

    def _choose(self, node: fx.Node, strategy: Strategy) -> None:
        self.chosen[node], self.now[node] = strategy, strategy.outputs

    def through_view(self, node: fx.Node, target: Shard) -> list[tuple[fx.Node, Placement]]:
        """How the argument of a view would be sharded, were its result sharded as ``target``."""
        arguments = tensor_arguments(node)
        if len(arguments) != 1 or not isinstance(meta(arguments[0])["val"], torch.Tensor):
            return []
        for dim in range(meta(arguments[0])["val"].dim()):
            # As a view turns it: in as many blocks, or in one.
            for blocks in dict.fromkeys((blocks_of(target), 1)):
                wanted = Strategy((of_kind(Shard(dim), blocks),), (target,))
                if wanted in self.rules.strategies(node, wanted.inputs):
                    return [(arguments[0], wanted.inputs[0])]
        return []

    def finish(self) -> None:
        """What follows from the strategies: constants, outputs."""
        self._shard_constants_at_their_source()
        self.place_outputs()

    def _shard_constants_at_their_source(self) -> None:
        """A constant that every reader takes a slice of is made so: a gradient of ones costs n-th."""
        results = set(self.program.results)
        for node in reversed(list(self.program.graph.nodes)):
            constant = node not in self.from_batch or node in self.sharded_for_some
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
            have = [self.now[argument][0] or REPLICATE for argument in arguments]
            asked = tuple(_sharded_like(argument, node, target) for argument in arguments)
            for strategy in self.rules.strategies(node, asked):
                pairs = zip(have, strategy.inputs, strict=True)
                free = all(h == w or isinstance(h, Replicate) for h, w in pairs)
                if free and strategy.outputs == (target,):
                    self._choose(node, strategy)
                    break

    def place_outputs(self) -> None:
        """Where inputs are whose new values they are, or where they are read."""
        for role, node, value in self.program.output_rows:
            written = roles.written_input(role)
            if written is not None and written in self.inputs:
                self.outputs[role] = self.inputs[written]
            elif isinstance(role, roles.Grad):
                self.outputs[role] = self.kind.updated(role.name, value.shape)
            elif isinstance(role, roles.InputGrad):
                self.outputs[role] = self._where_given(role.index)
            elif isinstance(role, roles.ModuleResult):
                self.outputs[role] = self.kind.returned(self, node)
            else:
                self.outputs[role] = REPLICATE

    def _where_given(self, index: int) -> Placement:
        given = self.inputs.items()
        return next(p for r, p in given if isinstance(r, roles.UserInput) and r.index == index)


def shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Of parameters, by name."""
    rows = program.input_rows
    return {role.name: value.shape for role, _, value in rows if isinstance(role, roles.Param)}


def as_sharded(walk: Walk, node: fx.Node) -> Placement:
    """Where a value is made, if it is sharded; sums are added up."""
    placement = walk.now[node][0]
    return placement if isinstance(placement, Shard) else REPLICATE


def _sharded_like(argument: fx.Node, node: fx.Node, target: Shard) -> Placement:
    """The same for an argument that broadcasting aligns at the right, if it can be had."""
    value, result = meta(argument)["val"], meta(node)["val"]
    if not isinstance(value, torch.Tensor):
        return REPLICATE  # several results, of which one is read
    if isinstance(target, InnerShard):
        return target if value.shape == result.shape else REPLICATE
    own = target.dim - (result.dim() - value.dim())
    fits = 0 <= own < value.dim() and value.shape[own] == result.shape[target.dim]
    return Shard(own) if fits else REPLICATE


def redistribution_bytes(value: object, have: Placement, want: Placement, ranks: int) -> float:
    """Bytes that one rank sends to change a placement; a local slice costs a thousandth of its bytes."""
    if have == want:
        return 0.0
    size = size_in_bytes(value)
    kind, wanted = type(have), type(want)  # isinstance is a call of Python's for these classes
    if kind is Replicate:
        return 1e-3 * size if wanted in _SHARDS else float("inf")
    if wanted is Partial:
        averages = kind is Partial and (have.reduce_op, want.reduce_op) == ("avg", "sum")  # type: ignore[attr-defined]
        return 1e-3 * size if averages else float("inf")
    # A mesh of one rank moves nothing; cost it as two, so that its plan is the same kind of plan.
    ranks = max(ranks, 2)
    share = size * (ranks - 1) / ranks
    if kind is InnerShard or (kind is Shard and wanted is InnerShard):
        return share  # by way of the whole
    if kind is Partial:
        return share if wanted in _SHARDS else 2 * share
    return share if wanted is Replicate else share / ranks


_SHARDS = (Shard, InnerShard)


def with_repeated_work(cost: float, node: fx.Node, reads: Sequence[Read]) -> float:
    """A cost, and a little for the bytes that are touched where every rank does the same work."""
    cost += 1e-2 * size_in_bytes(meta(node)["val"])
    return cost + 1e-2 * sum(size_in_bytes(meta(argument)["val"]) for argument, *_ in reads)
