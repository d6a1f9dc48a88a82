"""Rules for a torch whose own do not say all (2.11): they follow an argument, as it is placed.

Every placement under which an operator can run, whatever its arguments have, so that a walk takes the
cheapest. DTensor's rules of 2.13 say the same, and are asked where a torch has them
(:func:`stepgraph.torch_internals.sharding.knows_every_way`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.operators.ways import RULES, WHERE_TORCH_HAS_NONE, WHOLE, Way, element_by_element
from stepgraph.program.layout import InnerShard, blocks_of
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments
from stepgraph.torch_internals.sharding import knows_every_way

aten = torch.ops.aten


def every_way(
    node: fx.Node, placements: tuple[Placement, ...], results: list[object], ranks: int
) -> list[Way] | None:
    """Ways to run an operator over so many ranks, the whole one first; None where torch knows them.

    As in torch, nothing is sharded that no argument is, and in no other kind of shards.
    """
    op, elementwise = node.target, _is_elementwise(node.target)
    rule = RULES.get(op) or (element_by_element if elementwise else None)
    if rule is None and not torch_internals.has_sharding_rule(op):
        rule = WHERE_TORCH_HAS_NONE.get(op)
    if rule is None or knows_every_way(op):
        return None
    if not all(value is None or isinstance(value, torch.Tensor) for value in results):
        return None
    values = [meta(argument)["val"] for argument in tensor_arguments(node)]
    kinds = _kinds(placements)
    whole = tuple(None if value is None else WHOLE for value in results)
    ways: list[Way] = [((WHOLE,) * len(values), whole)]
    for inputs, outputs in rule(node, results):
        pairs = [*zip(inputs, values, strict=True), *zip(outputs, results, strict=True)]
        sizes = [v.shape[p.dim] for p, v in pairs if isinstance(p, Shard) and v is not None]  # type: ignore[union-attr]
        kept = elementwise and inputs == placements
        if kept or all(_divides(size, ranks, elementwise) for size in sizes):
            ways += [
                (
                    tuple(of_kind(p, kind) for p in inputs),
                    tuple(of_kind(p, kind) for p in outputs),
                )
                for kind in (kinds if sizes else [1])
            ]
    return ways


def has_every_way(op: Any) -> bool:
    """Whether there is a rule here, for a torch that has none or one that follows."""
    return op in RULES or op in WHERE_TORCH_HAS_NONE or _is_elementwise(op)


def _is_elementwise(op: Any) -> bool:
    tags = getattr(op, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _divides(size: int, ranks: int, elementwise: bool) -> bool:
    """Whether a dimension can be sharded: of what mixes no elements, parts may be of any size."""
    return size >= ranks if elementwise else size % ranks == 0


def of_kind(placement: Any, blocks: int) -> Any:
    """A shard of each block in place of one of the whole, where arguments have such."""
    inner = blocks > 1 and isinstance(placement, Shard)
    return InnerShard(placement.dim, blocks) if inner else placement


def kinds_apart(placements: tuple[Placement, ...]) -> list[tuple[tuple[Placement, ...], int]]:
    """What to ask torch, and of how many blocks the shards in its answers are (1: as it says).

    Older rules take a shard of blocks for no shard at all, and slice, join and reduce along it. What an
    operator does along a sharded dimension it does along the blocks; so they are asked about plain
    shards, one kind at a time.
    """
    kinds = _kinds(placements)
    if max(kinds, default=1) == 1 or knows_every_way(aten.add.Tensor):
        return [(placements, 1)]
    return [(tuple(_if_of_kind(p, kind) for p in placements), kind) for kind in kinds]


def _if_of_kind(placement: Placement, blocks: int) -> Placement:
    """The plain shard of one that is of so many blocks; what is sharded otherwise as whole."""
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim) if blocks_of(placement) == blocks else WHOLE


def _kinds(placements: Iterable[Placement]) -> list[int]:
    """Of how many blocks there are shards, each number once."""
    return list(dict.fromkeys(blocks_of(p) for p in placements if isinstance(p, Shard)))
