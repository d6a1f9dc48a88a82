"""Tensor parallelism along one mesh dimension: Megatron's pairs, found from the graph.

A weight that multiplies a whole activation is sharded by columns, so that its result is; the sharding
travels through whatever works on slices alone (activations, heads, attention) to a weight that is sharded
by rows, whose result is a pending sum. What would have to be gathered on its way is given up, and the
weight that began it stays on every rank (heads that do not divide, a projection that is split unevenly).
Embedding and loss are sharded by the vocabulary.

A fused projection, which is split into queries, keys and values, is divided too: each rank reads a slice of
each of these blocks. Such a weight is stored whole, and its gradient gathered: checkpoints and torch's
DTensors know no shards of blocks.

With sequence-parallel norms a pending sum is not added up on every rank: each rank gets a slice of the
sequence, does the norm's and the residual's share of the work on it, and keeps no more than that.

After Shoeybi et al., "Megatron-LM" (2019), and Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models" (2022). Names of modules are never looked at.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.cost.work import size_in_bytes
from stepgraph.operators.attention import ATTENTIONS
from stepgraph.operators.entries import Strategy
from stepgraph.operators.flex import FLEXES
from stepgraph.operators.sharding import Rules
from stepgraph.placement.presets.walk import (
    REPLICATE,
    SUM,
    Kind,
    Read,
    Walk,
    as_sharded,
    redistribution_bytes,
    shapes_of,
    with_repeated_work,
)
from stepgraph.placement.rules import blocks
from stepgraph.placement.rules.vocabulary import STRATEGIES
from stepgraph.program import roles
from stepgraph.program.layout import InnerShard
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, OPTIMIZER, Program, tensor_arguments

aten = torch.ops.aten

# A pending sum goes on through these, and is reduced in front of anything else: so the gradients of
# several columns' common input are added first and reduced once.
_PASS_SUMS = {
    aten.view.default, torch_internals.UNSAFE_VIEW, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.expand.default, aten.clone.default, aten.add.Tensor,
}  # fmt: skip

# These may read slices of an activation that every rank has: heads of keys and values that do not divide
# serve queries that do.
_SLICE_THEIR_INPUTS = {*ATTENTIONS, *FLEXES}

_NEVER = float("inf")

_BESIDE_RULES = {**STRATEGIES, **blocks.STRATEGIES}


@dataclass(frozen=True)
class TensorParallel:
    """What tensor parallelism knows of a Program, and decides by it.

    ``layout``: how each sharded parameter is read, by name, and stored, but for shards of blocks;
    ``blocks``: of those that are read so, how many. ``shapes``: of all parameters. ``made_of``: the
    parameters that go into a value that no row of the batch goes into. ``sequence``: the dimension along
    which an activation may be sharded beside the pairs. ``whole``: while a layout is looked for, the
    parameters that have to stay whole; any other is sharded as its readers like. None: it is found.
    """

    layout: Mapping[str, Placement]
    shapes: Mapping[str, tuple[int, ...]]
    made_of: Mapping[fx.Node, set[str]]
    blocks: Mapping[str, int] = field(default_factory=dict)
    sequence: Mapping[fx.Node, int] = field(default_factory=dict)
    whole: set[str] | None = None

    def walk(self, program: Program, ranks: int, others: int) -> Walk:
        """A walk that has placed the inputs."""
        decides = self._stored, self._laid_out, as_sharded, self._cost, self._sees
        kind = Kind(*decides, offers=self._offers)
        # Data parallelism divides rows of the batch, and a fused weight along another dimension.
        apart = frozenset(self.blocks.values())
        return Walk(program, kind, Rules(ranks, ranks, others, _BESIDE_RULES, apart))

    def _laid_out(self, parameter: str, shape: tuple[int, ...]) -> Placement:
        alike = self.shapes.get(parameter) == shape and parameter not in self.blocks
        return self.layout.get(parameter, REPLICATE) if alike else REPLICATE

    def _stored(self, role: roles.Input, shape: tuple[int, ...]) -> Placement:
        """Parameters, and what belongs to them, by the layout."""
        match role:
            case roles.Param(name) | roles.OptimizerState(name) | roles.GivenGrad(name):
                return self._laid_out(name, shape)
            case roles.Accumulator(name):
                return self._laid_out(name.removeprefix("grad:"), shape)
        return REPLICATE

    def _sees(self, walk: Walk, node: fx.Node) -> Hashable:
        """What :meth:`_offers` and :meth:`_cost` look at."""

        def about(argument: fx.Node) -> Hashable:
            names = self.made_of.get(argument)
            weights = names and (self._blocks_in(argument), names.isdisjoint(self.whole or ()))
            return (
                self.sequence.get(argument), walk.now.get(argument), argument in walk.from_batch,
                names is None, weights,
            )  # fmt: skip

        arguments = tuple(map(about, tensor_arguments(node)))
        return self.sequence.get(node), node in walk.from_batch, arguments

    def _offers(
        self, walk: Walk, node: fx.Node, placements: tuple[Placement, ...]
    ) -> list[Strategy]:
        """Also what could be done along the sequence, or with slices of weights.

        The rules speak of what is sharded already.
        """
        found = walk.rules.strategies(node, placements)
        arguments = tensor_arguments(node)
        if any(argument in self.sequence for argument in arguments):
            asked = tuple(
                Shard(self.sequence[argument]) if argument in self.sequence else placement
                for argument, placement in zip(arguments, placements, strict=True)
            )
            found = [*found, *walk.rules.strategies(node, asked)]
        for position, argument in enumerate(arguments):
            if placements[position] == REPLICATE and self._may_shard_weight(walk, node, argument):
                for dim in range(meta(argument)["val"].dim()):
                    shard = blocks.shard_of(dim, self._blocks_in(argument))
                    asked = (*placements[:position], shard, *placements[position + 1 :])
                    found = [*found, *walk.rules.strategies(node, asked)]
        return list(dict.fromkeys(found))

    def _may_shard_weight(self, walk: Walk, node: fx.Node, argument: fx.Node) -> bool:
        """Whether a value is made of weights alone that are free, for an operation on activations."""
        # Elementwise work on a weight alone is no product to divide.
        if argument not in self.made_of or node not in walk.from_batch:
            return False
        if self._blocks_in(argument) > 1:
            return meta(node)["phase"] != OPTIMIZER
        return self.whole is not None and not self.made_of[argument] & self.whole

    def _blocks_in(self, argument: fx.Node) -> int:
        """Of how many blocks a value that is made of weights is, each of which ranks have slices of."""
        found = {self.blocks.get(name, 1) for name in self.made_of[argument]}
        return found.pop() if len(found) == 1 else 1

    def _may_slice(self, walk: Walk, node: fx.Node, argument: fx.Node) -> bool:
        """Whether an operation may read a slice of what every rank has."""
        if argument in self.made_of and (self.whole is not None or self._blocks_in(argument) > 1):
            return self._may_shard_weight(walk, node, argument)
        if node.target in _SLICE_THEIR_INPUTS:
            return True
        return argument not in walk.from_batch and argument not in self.made_of

    def joins_sequence(self, walk: Walk, argument: fx.Node) -> bool:
        """Whether a value is sharded along its sequence."""
        dim = self.sequence.get(argument)
        return dim is not None and walk.now[argument] == (Shard(dim),)

    def _begins_sequence(
        self, walk: Walk, node: fx.Node, have: Placement, want: Placement, strategy: Strategy
    ) -> bool:
        """Whether a pending sum, or what is added to one, is sharded so that the result is."""
        dim = self.sequence.get(node)
        if dim is None or isinstance(have, Shard) or not isinstance(want, Shard):
            return False
        begun = any(
            self.joins_sequence(walk, argument) or isinstance(walk.now[argument][0], Partial)
            for argument in tensor_arguments(node)
        )
        return begun and strategy.outputs[0] == Shard(dim)

    def _cost(self, walk: Walk, node: fx.Node, strategy: Strategy, reads: Sequence[Read]) -> float:
        """Bytes moved between ranks, and a little for work that every rank repeats."""
        if meta(node)["phase"] == OPTIMIZER:
            return sum(
                redistribution_bytes(meta(argument)["val"], have, want, walk.rules.size)
                for argument, have, want in reads
            )
        if not self._table_is_sharded_so(node, strategy):
            return _NEVER
        sliced = [have != want for _, have, want in reads if isinstance(want, Shard)]
        begins = not sliced and any(isinstance(p, Shard) for p in strategy.outputs)
        if begins and node in walk.from_batch and node.target not in STRATEGIES:
            return _NEVER  # only weights begin one
        if node.target in _SLICE_THEIR_INPUTS and sliced and all(sliced):
            return _NEVER  # nor does attention, and the batch is not for tp to divide
        cost = sum(self._moved(walk, node, read, strategy) for read in reads)
        divided = any(isinstance(p, (Shard, Partial)) for p in strategy.outputs)
        if divided or node not in walk.from_batch:
            return cost
        return with_repeated_work(cost, node, reads)

    def _table_is_sharded_so(self, node: fx.Node, strategy: Strategy) -> bool:
        """Tables are sharded by rows, and their gradients where a table of that shape is."""
        if node.target is aten.embedding.default:
            return strategy.inputs[0] != Shard(1)
        if node.target is not aten.embedding_dense_backward.default:
            return True
        shape = tuple(meta(node)["val"].shape)
        tables = {where for name, where in self.layout.items() if self.shapes[name] == shape}
        return not isinstance(strategy.outputs[0], Shard) or strategy.outputs[0] in tables

    def _moved(self, walk: Walk, node: fx.Node, read: Read, strategy: Strategy) -> float:
        argument, have, want = read
        value = meta(argument)["val"]
        if self.joins_sequence(walk, argument) and isinstance(want, Shard):
            stays = all(p in (have, None) or isinstance(p, Partial) for p in strategy.outputs)
            # Norms and sums are done in slices, products are not.
            return 0.0 if stays and have == want else _NEVER
        if self._begins_sequence(walk, node, have, want, strategy):
            return redistribution_bytes(value, have, want, walk.rules.size)
        if isinstance(want, Partial):
            bias = node.target is aten.addmm.default and argument is node.args[0]
            # What is added to several pending gradients joins them, so that they are reduced once.
            joins = (
                node.target is aten.add.Tensor
                and meta(node)["phase"] == BACKWARD
                and any(walk.now[other] == (SUM,) for other in tensor_arguments(node))
            )
            added = joins or (bias and argument in self.made_of)
            if added and want == SUM and isinstance(have, Replicate):
                return 1e-3 * size_in_bytes(value)  # added on one rank
            return 0.0 if have == want and node.target in _PASS_SUMS else _NEVER
        if have == want:
            return 0.0
        if isinstance(want, Shard):
            # The cheapest reduction, or exchange of slices, would divide the batch.
            free = isinstance(have, Replicate) and self._may_slice(walk, node, argument)
            return 1e-3 * size_in_bytes(value) if free else _NEVER
        return redistribution_bytes(value, have, want, walk.rules.size)


def _made_of(program: Program) -> dict[fx.Node, set[str]]:
    found: dict[fx.Node, set[str]] = {}
    from_batch: set[fx.Node] = set()
    for role, node, _ in program.input_rows:
        if isinstance(role, roles.Param):
            found[node] = {role.name}
        elif isinstance(role, roles.UserInput):
            from_batch.add(node)
    for node in program.operations():
        arguments = tensor_arguments(node)
        if not from_batch.isdisjoint(arguments):
            from_batch.add(node)
        elif names := set().union(*(found.get(argument, ()) for argument in arguments)):
            found[node] = names
    return found


def walk_tensor_parallel(
    program: Program,
    ranks: int,
    others: int,
    layout: Mapping[str, Placement],
    sequence: Mapping[fx.Node, int],
) -> Walk:
    """Weights stay sharded; activations are sharded between pairs, whole elsewhere.

    Args:
        others: ranks along other mesh dimensions, which may shard the blocks of an InnerShard.
        layout, sequence: of :class:`TensorParallel`.
    """
    in_blocks = {name: p.outer for name, p in layout.items() if isinstance(p, InnerShard)}
    kind = TensorParallel(layout, shapes_of(program), _made_of(program), in_blocks, sequence)
    walk = kind.walk(program, ranks, others)
    walk.rows_in_blocks |= {name for name in in_blocks if layout[name].dim == 0}  # type: ignore[attr-defined]
    walk.place_operations()
    for node in program.operations():
        if any(kind.joins_sequence(walk, argument) for argument in tensor_arguments(node)):
            walk.unruled.pop(meta(node)["name"], None)  # meant, not a fallback
    walk.finish()
    return walk


def find_layout(
    program: Program, ranks: int, others: int, known: Mapping[str, Placement]
) -> dict[str, Placement]:
    """How tensor parallelism shards each parameter of a Program.

    The forward alone is walked, with weights free to be sharded as their readers like; those that began
    what had to be gathered are made to stay whole, and it is walked again. Where a split would gather what
    they began, they are sharded in its blocks first.

    Args:
        ranks, others: along the mesh dimension, and along all others together.
        known: parameters that another program has placed; all of them, or none.

    Returns:
        how the parameters that are sharded are read; the others stay whole. Shards of blocks are of
        parameters that are stored whole.
    """
    shapes = shapes_of(program)
    fixed = {n: p for n, p in known.items() if n in shapes and isinstance(p, Shard)}
    if known and shapes.keys() <= known.keys():
        found = find_layout(program, ranks, others, {}) if len(fixed) < len(shapes) else {}
        in_blocks = {n: p for n, p in found.items() if isinstance(p, InnerShard)}
        return in_blocks | fixed
    made_of = _made_of(program)
    whole = {name for name, placement in known.items() if isinstance(placement, Replicate)}
    in_blocks: dict[str, int] = {}
    while True:
        kind = TensorParallel({}, shapes, made_of, in_blocks, whole=whole)
        walk = kind.walk(program, ranks, others)
        walk.place_operations([FORWARD])
        layout, blamed = _wanted_layout(walk, made_of)
        given_up, split = _given_up(walk, made_of)
        split = {name: parts for name, parts in split.items() if name not in in_blocks}
        new = (blamed | given_up) - whole
        if split:  # what follows may then be sharded otherwise, and is not to blame yet
            in_blocks |= split
        elif new:
            whole |= new
            in_blocks = {name: parts for name, parts in in_blocks.items() if name not in new}
        else:
            return layout | fixed


def _given_up(walk: Walk, made_of: Mapping[fx.Node, set[str]]) -> tuple[set[str], dict[str, int]]:
    """Follows every shard from the weights that began it; those of what is gathered on its way.

    And of those that a split into equal parts gathers, how many parts.
    """
    blamed: set[str] = set()
    split: dict[str, int] = {}
    began: dict[fx.Node, set[str]] = {}
    for node, strategy in walk.chosen.items():
        here: set[str] = set()
        for argument, want in zip(tensor_arguments(node), strategy.inputs, strict=True):
            have = walk.placement_of(argument, node)
            if isinstance(want, Shard) and have != want:
                here |= made_of.get(argument, set())
            if isinstance(have, Shard):
                here |= began.get(argument, set())
                if have != want:
                    blamed |= began.get(argument, set())
                    parts = blocks.parts_of_split(node)
                    if parts is not None and have == Shard(parts[0]):
                        split |= dict.fromkeys(began.get(argument, set()), parts[1])
        if any(isinstance(placement, Shard) for placement in walk.now[node]):
            began[node] = here
    return blamed, split


def _wanted_layout(
    walk: Walk, made_of: Mapping[fx.Node, set[str]]
) -> tuple[dict[str, Placement], set[str]]:
    """How the readers want each parameter sharded; and those that two want differently."""
    wanted: dict[fx.Node, set[Placement]] = {}
    for node, strategy in walk.chosen.items():
        for argument, placement in zip(tensor_arguments(node), strategy.inputs, strict=True):
            if isinstance(placement, Shard) and argument in made_of:
                wanted.setdefault(argument, set()).add(placement)
    layout: dict[str, Placement] = {}
    blamed: set[str] = set()
    for node in reversed(list(walk.program.graph.nodes)):
        shards = wanted.get(node, set())
        if len(shards) > 1:
            blamed |= made_of[node]
        elif shards and node in walk.role_of:
            (layout[walk.role_of[node].name],) = shards  # type: ignore[union-attr]
        elif shards and walk.now[node] == (REPLICATE,):
            (shard,) = shards
            through = walk.through_view(node, shard) if isinstance(shard, Shard) else []
            if not through:
                blamed |= made_of[node]
            for argument, placement in through:
                wanted.setdefault(argument, set()).add(placement)
    return layout, blamed
