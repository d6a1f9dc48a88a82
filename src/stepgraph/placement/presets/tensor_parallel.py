"""Tensor parallelism along one mesh dimension: Megatron's pairs, found from the graph.

A weight that multiplies a whole activation is cut by columns, so that its result is cut; the cut
travels through whatever works on parts alone (activations, heads, attention) to a weight that is cut by
rows, whose result is a pending sum. A cut that would have to be gathered on its way is given up, and the
weight that began it stays on every rank (heads that do not divide, a projection that is split unevenly).
Embedding and loss are cut by the vocabulary.

With sequence-parallel norms a pending sum is not added up on every rank: each rank gets a part of the
sequence, does the norm's and the residual's share of the work on it, and keeps no more than that.

After Shoeybi et al., "Megatron-LM" (2019), and Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models" (2022). Names of modules are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.operators.sharding import Strategy
from stepgraph.placement.presets.walk import (
    REPLICATE,
    SUM,
    Walk,
    redistribution_bytes,
    size_in_bytes,
)
from stepgraph.placement.rules.vocabulary import STRATEGIES
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Program,
    tensor_arguments,
    tensors_of,
)
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

# A pending sum goes on through these, and is reduced in front of anything else: so the gradients of
# several columns' common input are added first and reduced once.
_PASS_SUMS = {
    aten.view.default, torch_internals.UNSAFE_VIEW, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.expand.default, aten.clone.default, aten.add.Tensor,
}  # fmt: skip

# An activation that every rank has may be cut in front of these: heads of keys and values that do not
# divide serve queries that do.
_CUT_THEIR_INPUTS = {
    private.CPU_ATTENTION,
    private.CPU_ATTENTION_BACKWARD,
}

_NEVER = float("inf")


class TensorParallel(Walk):
    """Weights stay cut; activations are cut between pairs, whole elsewhere.

    Args:
        layout: where each cut parameter is cut, by name.
        sequence: the dimension along which an activation may be cut beside the pairs (none by default).
    """

    def __init__(
        self,
        program: Program,
        ranks: int,
        others: int,
        layout: Mapping[str, Placement],
        sequence: Mapping[fx.Node, int] | None = None,
    ) -> None:
        super().__init__(program, ranks, ranks, others)
        self.sequence = sequence or {}
        self.rules.extra = STRATEGIES
        self.layout = layout
        self.shapes = {
            role.name: value.shape
            for role, value in zip(program.inputs, program.input_values, strict=True)
            if isinstance(role, roles.Param)
        }
        self.of_parameters: dict[fx.Node, set[str]] = {}

    def stored(self, role: roles.Input, shape: tuple[int, ...]) -> Placement:
        """Parameters, and what belongs to them, by the layout."""
        match role:
            case roles.Param(name) | roles.OptimizerState(name) | roles.GivenGrad(name):
                owner = name
            case roles.Accumulator(name):
                owner = name.removeprefix("grad:")
            case _:
                return REPLICATE
        return self.layout.get(owner, REPLICATE) if self.shapes.get(owner) == shape else REPLICATE

    def in_model(self, role: roles.Input, stored: Placement) -> Placement:
        """As stored."""
        return stored

    def updated(self, role: roles.Param, shape: tuple[int, ...]) -> Placement:
        """As stored."""
        return self.stored(role, shape)

    def crossing(self, node: fx.Node) -> Placement:
        """As it is made, and summed."""
        placement = self.now[node][0] or REPLICATE
        return placement if isinstance(placement, Shard) else REPLICATE

    def place_inputs(self) -> None:
        """Also notes which nodes are parameters."""
        super().place_inputs()
        for node, role in self.role_of.items():
            if isinstance(role, roles.Param):
                self.of_parameters[node] = {role.name}

    def place(self, node: fx.Node) -> None:
        """Also notes which parameters a value is made of."""
        super().place(node)
        if any(self._joins_sequence(argument) for argument in tensor_arguments(node)):
            self.unruled.pop(meta(node)["name"], None)  # meant, not a fallback
        made_of = [self.of_parameters.get(argument, set()) for argument in tensor_arguments(node)]
        if node not in self.from_batch and any(made_of):
            self.of_parameters[node] = set().union(*made_of)

    def offers(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
        """Also what could be done along the sequence: the rules speak of what is cut already."""
        found = super().offers(node, placements)
        arguments = tensor_arguments(node)
        if not any(argument in self.sequence for argument in arguments):
            return found
        asked = tuple(
            Shard(self.sequence[argument]) if argument in self.sequence else placement
            for argument, placement in zip(arguments, placements, strict=True)
        )
        return list(dict.fromkeys([*found, *self.rules.strategies(node, asked)]))

    def _joins_sequence(self, argument: fx.Node) -> bool:
        dim = self.sequence.get(argument)
        return dim is not None and self.now[argument] == (Shard(dim),)

    def _cuts_along_sequence(
        self, node: fx.Node, have: Placement, want: Placement, strategy: Strategy
    ) -> bool:
        """Whether a pending sum, or what is added to one, is cut so that the result is."""
        dim = self.sequence.get(node)
        if dim is None or isinstance(have, Shard) or not isinstance(want, Shard):
            return False
        begun = any(
            self._joins_sequence(argument) or isinstance(self.now[argument][0], Partial)
            for argument in tensor_arguments(node)
        )
        return begun and strategy.outputs[0] == Shard(dim)

    def may_cut(self, node: fx.Node, argument: fx.Node) -> bool:
        """Whether an operation may read a part of what every rank has."""
        if node.target in _CUT_THEIR_INPUTS:
            return True
        return argument not in self.from_batch and argument not in self.of_parameters

    def cost(
        self,
        node: fx.Node,
        arguments: Sequence[fx.Node],
        placements: Sequence[Placement],
        strategy: Strategy,
    ) -> float:
        """Bytes moved between ranks, and a little for work that every rank repeats."""
        rows = list(zip(arguments, placements, strategy.inputs, strict=True))
        if meta(node)["phase"] == OPTIMIZER:
            return sum(
                redistribution_bytes(meta(argument)["val"], have, want, self.ranks)
                for argument, have, want in rows
            )
        if not self._table_is_cut_so(node, strategy):
            return _NEVER
        if _begins_a_cut(strategy) and node in self.from_batch and node.target not in STRATEGIES:
            return _NEVER  # only weights begin one
        if node.target in _CUT_THEIR_INPUTS and _begins_with(strategy, placements):
            return _NEVER  # nor does attention, and the batch is not for tp to cut
        cost = sum(self._moved(node, *row, strategy) for row in rows)
        if any(isinstance(p, (Shard, Partial)) for p in strategy.outputs):
            return cost
        if node in self.from_batch:
            cost += 1e-2 * sum(size_in_bytes(value) for value in tensors_of(meta(node)["val"]))
            cost += 1e-2 * sum(size_in_bytes(meta(argument)["val"]) for argument in arguments)
        return cost

    def _table_is_cut_so(self, node: fx.Node, strategy: Strategy) -> bool:
        """Tables are cut by rows, and their gradients where a table of that shape is."""
        if node.target is aten.embedding.default:
            return strategy.inputs[0] != Shard(1)
        if node.target is not aten.embedding_dense_backward.default:
            return True
        shape = tuple(meta(node)["val"].shape)
        cuts = {self.layout[name] for name in self.layout if self.shapes[name] == shape}
        return not isinstance(strategy.outputs[0], Shard) or strategy.outputs[0] in cuts

    def _moved(
        self,
        node: fx.Node,
        argument: fx.Node,
        have: Placement,
        want: Placement,
        strategy: Strategy,
    ) -> float:
        value = meta(argument)["val"]
        if self._joins_sequence(argument) and isinstance(want, Shard):
            stays = all(p in (have, None) or isinstance(p, Partial) for p in strategy.outputs)
            # Norms and sums are done in parts, products are not.
            return 0.0 if stays and have == want else _NEVER
        if self._cuts_along_sequence(node, have, want, strategy):
            return redistribution_bytes(value, have, want, self.ranks)
        if isinstance(want, Partial):
            bias = node.target is aten.addmm.default and argument is node.args[0]
            # What is added to several pending gradients joins them, so that they are reduced once.
            joins = (
                node.target is aten.add.Tensor
                and meta(node)["phase"] == BACKWARD
                and any(self.now[other] == (SUM,) for other in tensor_arguments(node))
            )
            added = joins or (bias and argument in self.of_parameters)
            if added and want == SUM and isinstance(have, Replicate):
                return 1e-3 * size_in_bytes(value)  # added on one rank
            return 0.0 if have == want and node.target in _PASS_SUMS else _NEVER
        if have == want:
            return 0.0
        if isinstance(want, Shard):
            if isinstance(have, Replicate):
                return 1e-3 * size_in_bytes(value) if self.may_cut(node, argument) else _NEVER
            return _NEVER  # the cheapest reduction, or exchange of cuts, would cut the batch
        return redistribution_bytes(value, have, want, self.ranks)


def _begins_a_cut(strategy: Strategy) -> bool:
    cut_before = any(isinstance(placement, Shard) for placement in strategy.inputs)
    return not cut_before and any(isinstance(placement, Shard) for placement in strategy.outputs)


def _begins_with(strategy: Strategy, placements: Sequence[Placement]) -> bool:
    """Whether a strategy cuts arguments none of which is cut so yet."""
    cuts = [
        (have, want)
        for have, want in zip(placements, strategy.inputs, strict=True)
        if isinstance(want, Shard)
    ]
    return bool(cuts) and all(have != want for have, want in cuts)


class _Search(TensorParallel):
    """The forward alone, with weights free to be cut as their readers like, but for ``banned`` ones."""

    def __init__(self, program: Program, ranks: int, others: int, banned: set[str]) -> None:
        super().__init__(program, ranks, others, {})
        self.banned = banned
        self.blamed: set[str] = set()
        self.began: dict[fx.Node, set[str]] = {}

    def walk(self) -> None:
        """Up to the loss."""
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.now[node] = (REPLICATE,)
            elif node.op == "call_function" and meta(node)["phase"] == FORWARD:
                self.place(node)

    def offers(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
        """Also what could be done were a weight cut: the rules speak of what is cut already."""
        found = super().offers(node, placements)
        for position, argument in enumerate(tensor_arguments(node)):
            if placements[position] == REPLICATE and self.may_cut_weight(node, argument):
                for dim in range(meta(argument)["val"].dim()):
                    asked = (*placements[:position], Shard(dim), *placements[position + 1 :])
                    found = [*found, *self.rules.strategies(node, asked)]
        return list(dict.fromkeys(found))

    def may_cut_weight(self, node: fx.Node, argument: fx.Node) -> bool:
        """Whether a value is made of weights alone, for an operation on activations."""
        if argument not in self.of_parameters or argument in self.from_batch:
            return False
        # Elementwise work on a weight alone is no product to divide.
        return node in self.from_batch and not self.of_parameters[argument] & self.banned

    def may_cut(self, node: fx.Node, argument: fx.Node) -> bool:
        """Weights, too."""
        if argument in self.of_parameters:
            return self.may_cut_weight(node, argument)
        return super().may_cut(node, argument)

    def place(self, node: fx.Node) -> None:
        """Also follows every cut from the weights that began it."""
        super().place(node)
        began: set[str] = set()
        strategy = self.chosen[node]
        for argument, want in zip(tensor_arguments(node), strategy.inputs, strict=True):
            have = self.placement_of(argument, node)
            if isinstance(want, Shard) and have != want:
                began |= self.of_parameters.get(argument, set())
            if isinstance(have, Shard):
                began |= self.began.get(argument, set())
                if have != want:
                    self.blamed |= self.began.get(argument, set())
        if any(isinstance(placement, Shard) for placement in self.now[node]):
            self.began[node] = began

    def layout_found(self) -> dict[str, Placement]:
        """How the readers want each parameter cut; blames those that two want differently."""
        wanted: dict[fx.Node, set[Placement]] = {}
        for node, strategy in self.chosen.items():
            for argument, placement in zip(tensor_arguments(node), strategy.inputs, strict=True):
                if isinstance(placement, Shard) and argument in self.of_parameters:
                    wanted.setdefault(argument, set()).add(placement)
        layout: dict[str, Placement] = {}
        for node in reversed(list(self.program.graph.nodes)):
            cuts = wanted.get(node, set())
            if len(cuts) > 1:
                self.blamed |= self.of_parameters[node]
            elif cuts and node in self.role_of:
                (layout[self.role_of[node].name],) = cuts  # type: ignore[union-attr]
            elif cuts and self.now[node] == (REPLICATE,):
                (cut,) = cuts
                through = self.cut_through(node, cut) if isinstance(cut, Shard) else []
                if not through:
                    self.blamed |= self.of_parameters[node]
                for argument, placement in through:
                    wanted.setdefault(argument, set()).add(placement)
        return layout


def find_layout(
    program: Program, ranks: int, others: int, known: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Where tensor parallelism cuts each parameter of a Program.

    Args:
        ranks, others: along the mesh dimension, and along all others together.
        known: parameters that another program has placed; all of them, or none.

    Returns:
        placements of the parameters that are cut; the others stay whole.
    """
    names = {role.name for role in program.inputs if isinstance(role, roles.Param)}
    if names <= known.keys():
        return {name: known[name] for name in names if isinstance(known[name], Shard)}
    banned = {name for name, placement in known.items() if isinstance(placement, Replicate)}
    while True:
        search = _Search(program, ranks, others, banned)
        search.place_inputs()
        search.walk()
        layout = search.layout_found()
        new = search.blamed - banned
        if not new:
            fixed = {n: cut for n, cut in known.items() if n in names and isinstance(cut, Shard)}
            return layout | fixed
        banned |= new
