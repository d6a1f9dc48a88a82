"""What placements an operator accepts: DTensor's rules, and our entries for what they lack.

Questions are asked on one mesh dimension at a time (a 3-D question costs 44 times a 1-D one) and
cached by operator, shapes, literals and placements, so repeated layers cost one question.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.operators import own
from stepgraph.operators import table as operators
from stepgraph.operators.entries import (
    FOLLOWERS,
    TABLE,
    WHERE_DTENSOR_HAS_NONE,
    Entry,
    Strategy,
    is_mistaken,
    repeated,
    results_of,
)
from stepgraph.operators.every_way import every_way, kinds_apart, of_kind
from stepgraph.operators.ways import Way
from stepgraph.program.build import freeze
from stepgraph.program.layout import InnerShard, blocks_of, from_torch, to_torch
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments

aten = torch.ops.aten


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
        apart: numbers of blocks of an InnerShard that other mesh dimensions never shard.
    """

    def __init__(
        self,
        size: int,
        unit: int | None = None,
        others: int = 1,
        extra: Mapping[Any, Entry] | None = None,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        self.size, self.unit, self.others, self.extra = size, unit or size, others, extra or {}
        self.apart = apart
        self._mesh = torch_internals.planning_mesh((size,))
        self._answers: dict[Any, list[Strategy]] = {}
        kinds = tuple(sorted((str(op), id(entry)) for op, entry in self.extra.items()))
        self._shared = _answers_of(size, self.unit, others, kinds, apart)
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
        results = results_of(node)
        value = results[0]
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
                tuple(Shard(dim) if a.dim() else Replicate() for a in arguments),
                (Shard(dim),) * len(results),
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
            found += repeated(node)
        kept = [s for s in found if self._usable(s, arguments, results)]
        if not {*kept} - {replicate} and node.target in WHERE_DTENSOR_HAS_NONE:
            found = [replicate, *WHERE_DTENSOR_HAS_NONE[node.target](node, placements)]
            kept = [s for s in found if self._usable(s, arguments, results)]
        kept = [s for s in kept if not is_mistaken(node, s)]
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
                and (blocks == 1 or blocks in self.apart or blocks % self.others == 0)
            )
        if isinstance(placement, Partial):
            # Masked and norm partials carry state that a plain local program does not have.
            known = ("sum", "avg", "max", "min")
            return type(placement) is Partial and placement.reduce_op in known
        return isinstance(placement, Replicate)
