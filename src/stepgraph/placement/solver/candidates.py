"""Every way in which an operation can run on a mesh: what the solver chooses from.

The rules are asked about each operation on a mesh of two ranks, with its arguments placed in every way
that is worth asking about; strategies whose shards are uneven on the mesh at hand are left out later. On
several mesh dimensions a strategy is one strategy per dimension (:mod:`stepgraph.placement.presets.named`:
what is right on each is right on all).
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators import table as operators
from stepgraph.operators.entries import TABLE, Strategy
from stepgraph.operators.sharding import Rules
from stepgraph.operators.views import REARRANGES
from stepgraph.placement.rules.vocabulary import STRATEGIES
from stepgraph.placement.solver.dataflow import decided_here
from stepgraph.program.build import freeze
from stepgraph.program.layout import InnerShard
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten
REPLICATE, SUM = Replicate(), Partial("sum")

_PRODUCTS = {aten.mm.default, aten.addmm.default}
_CARRY_SUMS = {
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.clone.default, private.TO_COPY,
    aten.mul.Scalar, aten.div.Scalar, aten.sum.dim_IntList, aten.sum.default,
}  # fmt: skip
# Made of numbers alone: any part can be made alone.
_CONSTANTS = {aten.full.default, aten.zeros.default, aten.ones.default}


def find_strategies(program: Program) -> dict[fx.Node, list[Strategy]]:
    """Strategies of every operation that is decided here, along one mesh dimension.

    Repeated layers are asked about once.
    """
    rules = Rules(2, 1, extra=STRATEGIES)
    found: dict[fx.Node, list[Strategy]] = {}
    blocks_of: dict[fx.Node, tuple[InnerShard, ...]] = {}
    known: dict[Any, list[Strategy]] = {}
    for node in program.graph.nodes:
        if not decided_here(node):
            continue
        arguments = tensor_arguments(node)
        if node.target is operator.getitem:
            index = node.args[1]
            results = dict.fromkeys(s.outputs[index] for s in found[arguments[0]])  # type: ignore[index]
            found[node] = [Strategy((p,), (p,)) for p in results if p is not None]
            continue
        blocks = tuple(blocks_of.get(argument, ()) for argument in arguments)
        key = (node.target, freeze(node.args), freeze(node.kwargs), blocks)
        if key not in known:
            known[key] = _strategies(rules, node, blocks)
        found[node] = known[key]
        inner = {p for s in found[node] for p in s.outputs if isinstance(p, InnerShard)}
        blocks_of[node] = tuple(sorted(inner, key=lambda p: (p.dim, p.outer)))
    return found


def _strategies(
    rules: Rules, node: fx.Node, blocks: Sequence[Sequence[InnerShard]]
) -> list[Strategy]:
    """All strategies of an operation.

    Args:
        node: an operation with global shapes.
        blocks: per tensor argument the shards of blocks that it may have.
    """
    found: dict[Strategy, None] = {}
    for placements in _questions(node, blocks):
        found |= dict.fromkeys(rules.strategies(node, placements))
    if node.target in _PRODUCTS:
        for outer in sorted({block.outer for each in blocks for block in each}):
            turned = (_in_blocks(s, outer, blocks) for s in list(found))
            found |= dict.fromkeys(s for s in turned if s is not None)
    if node.target in _CONSTANTS:
        value = meta(node)["val"]
        found |= {Strategy((), (Shard(dim),)): None for dim in range(value.dim())}
    # A pending sum is worth carrying on only through what gradients are added up by.
    # And through a loss's division by a count: nothing waits for what is added up after it.
    quotient = node.target is aten.div.Tensor and not meta(node)["val"].dim()
    carries = quotient or node.target in _CARRY_SUMS or node.target in REARRANGES
    return [
        strategy
        for strategy in found
        if not _is_odd(strategy, blocks) and (carries or SUM not in strategy.inputs)
    ]


def _questions(
    node: fx.Node, blocks: Sequence[Sequence[InnerShard]]
) -> Iterable[tuple[Placement, ...]]:
    values = [meta(argument)["val"] for argument in tensor_arguments(node)]
    whole = (REPLICATE,) * len(values)
    yield whole
    if node.target in TABLE:  # its answers do not depend on the question
        return
    ranks = [value.dim() if isinstance(value, torch.Tensor) else 0 for value in values]
    if len(values) > 1:
        for dim in range(max(ranks)):
            yield tuple(Shard(dim) if dim < rank else REPLICATE for rank in ranks)
        yield (SUM,) * len(values)
    # Of what is alike, element by element, one part asks for the same parts of all others.
    shapes = {value.shape if isinstance(value, torch.Tensor) else None for value in values}
    alike = len(values) > 1 and len(shapes) == 1 and operators.of(node.target).elementwise
    for position, rank in enumerate(ranks):
        alone = () if alike else map(Shard, range(rank))
        for placement in (*alone, *blocks[position], SUM):
            yield (*whole[:position], placement, *whole[position + 1 :])


def _in_blocks(
    strategy: Strategy, outer: int, blocks: Sequence[Sequence[InnerShard]]
) -> Strategy | None:
    """A product's strategy on rows sharded in blocks (or sums over them), where its arguments can be."""

    def turned(placement: Placement | None) -> Placement | None:
        return InnerShard(placement.dim, outer) if isinstance(placement, Shard) else placement

    inputs = tuple(map(turned, strategy.inputs))
    for placement, possible in zip(inputs, blocks, strict=True):
        if isinstance(placement, InnerShard) and placement not in possible:
            return None
    return Strategy(inputs, tuple(map(turned, strategy.outputs)))  # type: ignore[arg-type]


def _is_odd(strategy: Strategy, blocks: Sequence[Sequence[InnerShard]]) -> bool:
    """Whether a strategy is right and useless.

    It takes slices of blocks that its argument is never in; it is a view that begins to shard a width in
    blocks (a part of every head); or it passes on maxima, which a result on several mesh dimensions could
    not tell from sums.
    """
    for placement, possible in zip(strategy.inputs, blocks, strict=True):
        if isinstance(placement, InnerShard) and placement not in possible:
            return True
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            return True
    begins = not any(isinstance(p, InnerShard) for p in strategy.inputs)
    return begins and any(isinstance(p, InnerShard) and p.dim for p in strategy.outputs)
