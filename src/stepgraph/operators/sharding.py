"""What placements an operator accepts: DTensor's rules, and a table for what they lack.

Questions are asked on one mesh dimension at a time (a 3-D question costs 44 times a 1-D one) and
cached by operator, shapes, literals and placements, so repeated layers cost one question.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.operators import flex, own
from stepgraph.operators import table as operators
from stepgraph.operators.attention import ATTENTIONS
from stepgraph.operators.every_way import every_way, kinds_apart, of_kind
from stepgraph.operators.flex import FLEXES
from stepgraph.operators.ways import Way
from stepgraph.program.build import freeze
from stepgraph.program.layout import InnerShard, blocks_of, from_torch, to_torch
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments
from stepgraph.program.randomness import RANDOM
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@dataclass(frozen=True)
class Strategy:
    """Placements on one mesh dimension under which running the operator locally is right.

    ``inputs`` in the order of :func:`tensor_arguments`; ``outputs`` one per result tensor (None for a
    result that is not a tensor).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]


def results_of(node: fx.Node) -> list[object]:
    """What an operation returns, position by position; a result that was not asked for is None."""
    value = meta(node)["val"]
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _aligned(strategy: Strategy, results: list[object]) -> Strategy:
    """Rules may leave out the results that were not asked for; put them back as None."""
    asked = [value is not None for value in results]
    if len(strategy.outputs) == len(results) or len(strategy.outputs) != sum(asked):
        return strategy
    given = iter(strategy.outputs)
    return Strategy(strategy.inputs, tuple(next(given) if a else None for a in asked))


_MOST_ANSWERS = 50_000


@functools.lru_cache(maxsize=32)
def _answers_of(*ranks: Any) -> dict[Any, list[Strategy]]:
    """Answers by question, for so many ranks: presets of one mesh ask the same ones."""
    return {}


class Rules:
    """Answers "under which placements can this operator run locally" for one mesh dimension.

    Args:
        size: ranks along the dimension.
        unit: what a sharded dimension must divide by; more than ``size`` where other mesh dimensions
            shard it as well.
        others: ranks along all other mesh dimensions: they may shard the blocks of an InnerShard.
        extra: strategies beside those of DTensor and the table, by operator.
    """

    def __init__(
        self,
        size: int,
        unit: int | None = None,
        others: int = 1,
        extra: Mapping[Any, Entry] | None = None,
    ) -> None:
        self.size, self.unit, self.others, self.extra = size, unit or size, others, extra or {}
        self._mesh = torch_internals.planning_mesh((size,))
        self._answers: dict[Any, list[Strategy]] = {}
        kinds = tuple(sorted((str(op), id(entry)) for op, entry in self.extra.items()))
        self._shared = _answers_of(size, self.unit, others, kinds)
        self.without_rule: set[str] = set()

    def strategies(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
        """All strategies worth considering when the arguments are placed as given.

        Replicating everything is always among them: the last, unless a rule says it earlier.
        """
        key = (node.target, freeze(node.args), freeze(node.kwargs), placements)
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._asked(node, placements, key)
        return found

    def _asked(self, node: fx.Node, placements: tuple[Placement, ...], key: Any) -> list[Strategy]:
        """The answer, which other walks over the same step have had, too, if it is about torch's own."""
        if getattr(node.target, "namespace", "") != "aten":
            return self._ask(node, placements)
        if key not in self._shared:
            if len(self._shared) >= _MOST_ANSWERS:
                self._shared.clear()
            before = len(self.without_rule)
            found = self._ask(node, placements)
            if len(self.without_rule) > before:  # to be told again
                return found
            self._shared[key] = found
        return self._shared[key]

    def element_by_element(self, node: fx.Node, placements: Sequence[Placement]) -> list[Strategy]:
        """Strategies of an elementwise operation on shards of any size, padding included.

        Padding may go through arithmetic whose results at the padding nobody reads; for anything
        that mixes elements, shards must be even (:meth:`strategies`). A sum is an exception where
        the padding is known to be zero.
        """
        value = meta(node)["val"]
        arguments = [meta(argument)["val"] for argument in tensor_arguments(node)]
        dims = dict.fromkeys(p.dim for p in placements if isinstance(p, Shard)) or {0: None}
        if meta(node).get("padding_is_zero"):
            inside = [dim for dim in dims if dim < arguments[0].dim()]
            return [Strategy((Shard(dim),), (Partial("sum"),)) for dim in inside]
        if (
            not operators.of(node.target).elementwise
            or not isinstance(value, torch.Tensor)
            or not value.dim()
        ):
            return []
        if any(a.dim() and a.shape != value.shape for a in arguments):
            return []
        return [
            Strategy(
                tuple(Shard(dim) if a.dim() else Replicate() for a in arguments), (Shard(dim),)
            )
            for dim in dims
            if dim < value.dim()
        ]

    def _ask(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
        arguments = tensor_arguments(node)
        results = results_of(node)
        replicate = Strategy((Replicate(),) * len(arguments), (Replicate(),) * len(results))
        entry = TABLE.get(node.target) or FOLLOWERS.get(node.target)
        told = own.REGISTERED.get(node.target)
        if told is not None and told.sharding:
            found = [Strategy(*way) for way in own.ways_of(node, results)]
        elif entry is not None:
            found = entry(node, placements)
        elif (ways := every_way(node, placements, results, self.size)) is not None:
            found = [Strategy(*way) for way in ways]
        else:
            try:
                found = [
                    Strategy(*(tuple(of_kind(p, kind) for p in side) for side in way))
                    for asked, kind in kinds_apart(placements)
                    for way in self._ask_dtensor(node, asked)
                ]
            except Exception:  # rules raise all sorts on arguments they cannot handle
                if node.target not in WHERE_DTENSOR_HAS_NONE:
                    self.without_rule.add(str(node.target))
                found = []
        if node.target in self.extra:
            found = [*found, *self.extra[node.target](node, placements)]
        found = [_aligned(strategy, results) for strategy in found]
        if node.target is aten.expand.default:
            found += _repeated(node)
        kept = [s for s in found if self._usable(s, arguments, results)]
        if not {*kept} - {replicate} and node.target in WHERE_DTENSOR_HAS_NONE:
            found = [replicate, *WHERE_DTENSOR_HAS_NONE[node.target](node, placements)]
            kept = [s for s in found if self._usable(s, arguments, results)]
        kept = [s for s in kept if not _is_mistaken(node, s)]
        return list(dict.fromkeys([*kept, replicate]))

    def _ask_dtensor(self, node: fx.Node, placements: tuple[Placement, ...]) -> list[Way]:
        remaining = iter(placements)

        def to_spec(argument: fx.Node):
            value = meta(argument)["val"]
            if not isinstance(value, torch.Tensor):
                raise NotImplementedError("a result tuple as an argument")
            return torch_internals.tensor_spec(self._mesh, (to_torch(next(remaining)),), value)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), to_spec)
        answers = torch_internals.sharding_strategies(
            node.target, tuple(args), dict(kwargs), meta(node)["val"]
        )
        found: list[Way] = []
        for inputs, outputs in answers:
            results = tuple(p and from_torch(p) for p in outputs)
            found.append((results if inputs is None else tuple(map(from_torch, inputs)), results))  # type: ignore[arg-type]
        return found

    def _usable(self, strategy: Strategy, arguments: list, results: list) -> bool:
        """Whether a strategy fits the call: one placement per tensor, even shards, known kinds."""
        if len(strategy.inputs) != len(arguments) or len(strategy.outputs) != len(results):
            return False
        values = [meta(argument)["val"] for argument in arguments]
        pairs = [*zip(strategy.inputs, values, strict=True)]
        pairs += [
            (placement, value)
            for placement, value in zip(strategy.outputs, results, strict=True)
            if placement is not None and value is not None
        ]
        return all(self._placeable(placement, value) for placement, value in pairs)

    def _placeable(self, placement: Placement, value: object) -> bool:
        if isinstance(placement, Shard):
            blocks = blocks_of(placement)
            return (
                type(placement) in (Shard, InnerShard)
                and isinstance(value, torch.Tensor)
                and placement.dim < value.dim()
                and value.shape[placement.dim] % (blocks * self.unit) == 0
                and (blocks == 1 or blocks % self.others == 0)
            )
        if isinstance(placement, Partial):
            # Masked and norm partials carry state that a plain local program does not have.
            known = ("sum", "avg", "max", "min")
            return type(placement) is Partial and placement.reduce_op in known
        return isinstance(placement, Replicate)


# ------------------------------------------------------------------------------------------ table
#
# One entry an operator: what DTensor has no rule for, or answers in a way that a plain local program
# cannot follow. An entry takes the node and its arguments' placements and returns strategies.

Entry = Callable[[fx.Node, tuple[Placement, ...]], list[Strategy]]


def _same_everywhere(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Constants and counters: every rank makes its own copy."""
    return []


def _follows_first(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """The result is placed like the only argument, whatever that is."""
    return [Strategy((placements[0],), (placements[0],))]


def _transposed(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Shards of the other dimension, those of blocks, too (which torch 2.11 leaves where they are)."""
    (place,), rank = placements, meta(node)["val"].dim()
    if not isinstance(place, Shard) or rank < 2:
        return [Strategy((place,), (place,))]
    other = 1 - place.dim
    inner = isinstance(place, InnerShard)
    return [Strategy((place,), (InnerShard(other, place.outer) if inner else Shard(other),))]


def _batch_and_heads(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Attention: independent over batch and heads, the first two dimensions of all arguments and results.

    What has one of them (a mask, the heads of keys that all queries share) serves every part.
    """
    strategies = []
    shapes = [meta(argument)["val"].shape for argument in tensor_arguments(node)]
    for dim in (0, 1):
        if max(shape[dim] for shape in shapes) == 1:
            continue
        wanted = tuple(Replicate() if shape[dim] == 1 else Shard(dim) for shape in shapes)
        results = tuple(_part(value, dim) for value in results_of(node))
        strategies.append(Strategy(wanted, results))
    return strategies


def _batch_and_heads_of_functions(
    node: fx.Node, placements: tuple[Placement, ...]
) -> list[Strategy]:
    """The same, as far as the functions of scores and positions allow."""
    ways = [way for dim in (0, 1) if (way := flex.along(node, dim)) is not None]
    return [
        Strategy(
            tuple(Replicate() if dim is None else Shard(dim) for dim in arguments),
            tuple(Partial("sum") if dim is None else Shard(dim) for dim in results),
        )
        for arguments, results in ways
    ]


def _part(result: object, dim: int) -> Placement:
    """Of a result along a dimension: the gradient of the one head that all heads share is a sum."""
    assert isinstance(result, torch.Tensor)
    return Partial("sum") if result.shape[dim] == 1 else Shard(dim)


def _sorted_into_rows(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Embedding gradient: every rank adds up its own tokens' rows."""
    if len(node.args) > 4 and node.args[4]:
        return []  # scale_grad_by_freq counts a token's rows in the whole batch
    gradient, indices = (meta(argument)["val"] for argument in tensor_arguments(node)[:2])
    strategies = [
        Strategy((Shard(dim), Shard(dim)), (Partial("sum"),)) for dim in range(indices.dim())
    ]
    return [*strategies, Strategy((Shard(gradient.dim() - 1), Replicate()), (Shard(1),))]


def _looked_up(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Embedding: rows of the indices' shards, or columns of the table."""
    indices = meta(tensor_arguments(node)[1])["val"]
    by_index = [Strategy((Replicate(), Shard(dim)), (Shard(dim),)) for dim in range(indices.dim())]
    return [*by_index, Strategy((Shard(1), Replicate()), (Shard(indices.dim()),))]


def _reshaped(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """View: a shard stays where its slices are the same elements in the order of memory.

    A shard takes a slice of each of ``before`` blocks of that order: of as many in argument and result.
    (DTensor keeps the blocks of a dimension that it splits, which are then others.)
    """
    place, old, new = placements[0], meta(node.args[0])["val"].shape, meta(node)["val"].shape  # type: ignore[union-attr]
    if not isinstance(place, Shard):
        return [Strategy((place,), (place,))]
    before = math.prod(old[: place.dim]) * blocks_of(place)
    for dim in reversed(range(len(new))):
        outer, rest = divmod(before, math.prod(new[:dim]) or before + 1)
        if outer and not rest:
            return [Strategy((place,), (Shard(dim) if outer == 1 else InnerShard(dim, outer),))]
    return []


def _is_mistaken(node: fx.Node, strategy: Strategy) -> bool:
    """Whether an answer of DTensor's is a wrong one; each was seen in torch 2.11."""
    first = strategy.inputs[0] if strategy.inputs else None
    if node.target in (aten.argmax.default, aten.argmin.default):  # of one rank, not of the whole
        return any(isinstance(p, Partial) for p in strategy.outputs)
    if node.target in (private.SOFTMAX, private.LOG_SOFTMAX):  # all of a sum is needed
        dim = node.args[1] % meta(node)["val"].dim()  # type: ignore[operator]
        return isinstance(first, Shard) and first.dim == dim
    return False


def _scattered(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Shards of a dimension along which nothing is scattered."""
    shapes = [meta(argument)["val"].shape for argument in tensor_arguments(node)]
    along = node.args[1] % len(shapes[0])  # type: ignore[operator]
    alike = [len(set(sizes)) == 1 for sizes in zip(*shapes, strict=True)]
    free = [dim for dim, same in enumerate(alike) if same and dim != along]
    return [Strategy((Shard(dim),) * len(shapes), (Shard(dim),)) for dim in free]


def _repeated(node: fx.Node) -> list[Strategy]:
    """Expand: along a dimension that it repeats, a part costs nothing (DTensor repeats whole)."""
    before, after = meta(node.args[0])["val"].shape, meta(node)["val"].shape  # type: ignore[union-attr]
    new = len(after) - len(before)
    repeated = [d for d in range(len(after)) if d < new or before[d - new] != after[d]]
    return [Strategy((Replicate(),), (Shard(d),)) for d in repeated]


def _drawn(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """Random numbers: any part can be drawn alone; whole, until a reader wants it sharded."""
    shards = [Shard(dim) for dim in range(meta(node)["val"].dim())]
    return [Strategy((Replicate(),), (where,)) for where in (Replicate(), *shards)]


_CONSTANTS = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default,
    aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.scalar_tensor.default,
    aten.eye.default, aten.linspace.default,
)  # fmt: skip

TABLE: dict[Any, Entry] = {
    **dict.fromkeys(_CONSTANTS, _same_everywhere),
    RANDOM: _drawn,
    aten.embedding.default: _looked_up,
    aten.embedding_dense_backward.default: _sorted_into_rows,
    **dict.fromkeys(ATTENTIONS, _batch_and_heads),
    **dict.fromkeys(FLEXES, _batch_and_heads_of_functions),
}

# Where a torch only replicates (torch 2.11).
WHERE_DTENSOR_HAS_NONE: dict[Any, Entry] = {
    aten.scatter.value: _scattered,
    aten.scatter.src: _scattered,
}

# Entries that answer only for the placements in question.
FOLLOWERS: dict[Any, Entry] = {
    aten.lift_fresh_copy.default: _follows_first,
    aten.t.default: _transposed,
    aten.view.default: _reshaped,
    torch_internals.UNSAFE_VIEW: _reshaped,
}
