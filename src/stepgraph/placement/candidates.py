"""Every way in which an operation can run on a mesh: what the solver chooses from.

The rules are asked about each operation on a mesh of two ranks, with its arguments placed in every way
that is worth asking about; strategies whose shards are uneven on the mesh at hand are left out later. On
several mesh dimensions a strategy is one strategy per dimension (:mod:`stepgraph.placement.policies`:
what is right on each is right on all).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.placement.rules import TABLE, Rules, Strategy, results_of, tensor_arguments
from stepgraph.placement.vocabulary import STRATEGIES
from stepgraph.program.layout import InnerShard, MeshShape, Placements, blocks_of

aten = torch.ops.aten
REPLICATE, SUM = Replicate(), Partial("sum")

_PRODUCTS = {aten.mm.default, aten.addmm.default}
# Made of numbers alone: any part can be made alone.
_CONSTANTS = {aten.full.default, aten.zeros.default, aten.ones.default}


class Candidates:
    """The strategies of operations along one mesh dimension, whatever its size."""

    def __init__(self) -> None:
        self._rules = Rules(2, 1)
        self._rules.extra = STRATEGIES

    def of(self, node: fx.Node, blocks: Sequence[Placement] = ()) -> list[Strategy]:
        """All strategies of an operation.

        Args:
            node: an operation with global shapes.
            blocks: cuts of blocks (:class:`InnerShard`) that its arguments may have.
        """
        arguments = tensor_arguments(node)
        found: dict[Strategy, None] = {}
        for placements in self._questions(node, arguments, blocks):
            for strategy in self._rules.strategies(node, placements):
                found[strategy] = None
        if node.target in _PRODUCTS:
            for block in blocks:
                assert isinstance(block, InnerShard)
                found |= dict.fromkeys(_in_blocks(node, s, block) for s in list(found))
        if node.target in _CONSTANTS:
            value = node.meta["val"]
            found |= {Strategy((), (Shard(dim),)): None for dim in range(value.dim())}
        return [strategy for strategy in found if not _mixes(strategy)]

    def _questions(
        self, node: fx.Node, arguments: list[fx.Node], blocks: Sequence[Placement]
    ) -> Iterable[tuple[Placement, ...]]:
        whole = (REPLICATE,) * len(arguments)
        yield whole
        if node.target in TABLE:  # its answers do not depend on the question
            return
        values = [argument.meta["val"] for argument in arguments]
        ranks = [value.dim() if isinstance(value, torch.Tensor) else 0 for value in values]
        for dim in range(max(ranks)):
            asked = tuple(Shard(dim) if dim < rank else REPLICATE for rank in ranks)
            if len(arguments) > 1:
                yield asked
        if len(arguments) > 1:
            yield (SUM,) * len(arguments)
        for position, rank in enumerate(ranks):
            cuts: list[Placement] = [Shard(dim) for dim in range(rank)]
            cuts += [b for b in blocks if isinstance(b, Shard) and b.dim < rank]
            for placement in [*cuts, SUM]:
                yield (*whole[:position], placement, *whole[position + 1 :])


def _in_blocks(node: fx.Node, strategy: Strategy, block: InnerShard) -> Strategy:
    """A product's strategy on rows cut in blocks, if it cuts rows (or sums over them)."""

    def turned(placement: Placement | None, value: torch.Tensor) -> Placement | None:
        plain = isinstance(placement, Shard) and not isinstance(placement, InnerShard)
        rows = plain and value.shape[placement.dim] % block.outer == 0  # type: ignore[union-attr]
        return InnerShard(placement.dim, block.outer) if rows else placement  # type: ignore[union-attr]

    values = [argument.meta["val"] for argument in tensor_arguments(node)]
    turn = zip(strategy.inputs, values, strict=True)
    return Strategy(
        tuple(turned(p, v) for p, v in turn),  # type: ignore[misc]
        tuple(turned(p, node.meta["val"]) for p in strategy.outputs),
    )


def _mixes(strategy: Strategy) -> bool:
    """Whether a strategy reduces in ways that a result on several mesh dimensions cannot tell apart."""
    kinds = {p.reduce_op for p in strategy.inputs if isinstance(p, Partial)}
    return bool(kinds - {"sum"})


def divides(shape: Sequence[int], placements: Placements, mesh: MeshShape) -> bool:
    """Whether a value is cut evenly, and cuts of one dimension by several mesh dimensions agree."""
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        cuts = [
            (blocks_of(p), ranks)
            for p, ranks in zip(placements, mesh.sizes, strict=True)
            if isinstance(p, Shard) and p.dim == dim
        ]
        left = shape[dim] if dim < len(shape) else 0
        for blocks, ranks in sorted(cuts):
            outer = [r for b, r in cuts if b < blocks]
            if any(blocks % r for r in outer) or left % ranks or left == 0:
                return False
            left //= ranks
        for blocks, _ in cuts:
            if blocks > 1 and shape[dim] % blocks:
                return False
            inner = [r for b, r in cuts if b == blocks]
            if blocks > 1 and (shape[dim] // blocks) % _product(inner):
                return False
    kinds = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(kinds) <= 1


def _product(numbers: Iterable[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total
