"""What placements single operators accept, where DTensor has no rule for one, or a wrong one.

One entry an operator: it takes the node and its arguments' placements, and returns strategies that a plain
local program can follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.operators import flex
from stepgraph.operators.attention import ATTENTIONS
from stepgraph.operators.flex import FLEXES
from stepgraph.operators.updates import UPDATE
from stepgraph.operators.ways import element_by_element
from stepgraph.program.layout import InnerShard, blocks_of
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


def _updated(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """A parameter's update: numbers are the same on all ranks."""
    return [Strategy(*way) for way in element_by_element(node, results_of(node))]


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


def is_mistaken(node: fx.Node, strategy: Strategy) -> bool:
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


def repeated(node: fx.Node) -> list[Strategy]:
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
    UPDATE: _updated,
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
