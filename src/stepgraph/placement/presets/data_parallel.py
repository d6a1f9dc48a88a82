"""Data parallelism along one mesh dimension: the batch is divided, gradients are reduced.

Activations are sharded on the batch, parameters are whole where they are used, and every gradient
leaves the backward as a pending sum that is reduced once. The operations' placements come from the
rules (:mod:`stepgraph.operators.sharding`), but the choice among them is ours: an activation is never
communicated where a rule lets it stay, and work on the batch is never repeated on every rank where a
rule lets it be divided. What is sharded between uses is what ``ddp``, ``hsdp`` and the stages of ZeRO
differ in.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.analysis.rows import surely_rows
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
    with_repeated_work,
)
from stepgraph.program import roles
from stepgraph.program.mesh_roles import Role
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, tensor_arguments


@dataclass(frozen=True)
class Storage:
    """What is sharded along a data-parallel dimension, and what is on every rank.

    ``accumulate_sharded``: with micro-batches, reduce each one's gradients into a sharded
    accumulator, instead of once at the end. ``gather_again``: a parameter that was gathered for the forward
    is not kept for the backward.
    """

    shard_parameters: bool
    shard_optimizer: bool
    accumulate_sharded: bool
    gather_again: bool = True


WHOLE = Storage(shard_parameters=False, shard_optimizer=False, accumulate_sharded=False)
_ZERO1 = Storage(shard_parameters=False, shard_optimizer=True, accumulate_sharded=False)
_ZERO2 = Storage(shard_parameters=False, shard_optimizer=True, accumulate_sharded=True)
ZERO3 = Storage(shard_parameters=True, shard_optimizer=True, accumulate_sharded=True)

PRESETS: dict[str, dict[Role, Storage]] = {
    "ddp": {Role.DATA: WHOLE},
    "zero1": {Role.DATA: _ZERO1},
    "zero2": {Role.DATA: _ZERO2},
    "zero3": {Role.DATA: ZERO3},
    "zero3-keep": {Role.DATA: replace(ZERO3, gather_again=False)},
    "hsdp": {Role.REPLICATE: WHOLE, Role.SHARD: ZERO3},
}


def data_parallel(unit: int, storage: Storage, taken: frozenset = frozenset()) -> Kind:
    """The batch is sharded, parameters are whole where the model reads them.

    Args:
        unit: ranks along all data-parallel dimensions.
        storage: what is sharded between uses.
        taken: names of parameters, and gradients on their way into the update, whose dimension 0 another
            kind of parallelism shards: dimension 1 is sharded here.
    """

    def sharded(wanted: bool, parameter: object, shape: tuple[int, ...]) -> Placement:
        dim = 1 if parameter in taken else 0
        return Shard(dim) if wanted and len(shape) > dim else REPLICATE

    def stored(role: roles.Input, shape: tuple[int, ...]) -> Placement:
        match role:
            case roles.Param(name):
                return sharded(storage.shard_parameters, name, shape)
            case roles.GivenGrad(name) | roles.OptimizerState(name):
                return updated(name, shape)
            case roles.UserInput():
                return Shard(0) if shape and shape[0] % unit == 0 else REPLICATE
            case roles.Accumulator(name) if name.startswith("grad:") and storage.accumulate_sharded:
                return updated(name.removeprefix("grad:"), shape)
            case roles.Accumulator():
                return SUM
        return REPLICATE

    def updated(parameter: object, shape: tuple[int, ...]) -> Placement:
        return sharded(storage.shard_optimizer, parameter, shape)

    def crossing(walk: Walk, node: fx.Node) -> Placement:
        """Reduced on the way into the update, once."""
        value = meta(node)["val"]
        if not isinstance(value, torch.Tensor):
            return walk.now[node][0] or REPLICATE
        return updated(node, tuple(value.shape))

    def returned(walk: Walk, node: fx.Node) -> Placement:
        """This rank's rows, if the result has any; also where every rank has computed all of them."""
        placement = as_sharded(walk, node)
        rows = placement is REPLICATE and surely_rows(walk.program, node, unit)
        return Shard(0) if rows else placement

    return Kind(
        stored,
        updated,
        crossing,
        _cost,
        _is_work_on_the_batch,
        returned=returned,
        gathers=True,
        reduces_each=storage.accumulate_sharded,
    )


def walk_data_parallel(
    program: Program, ranks: int, unit: int, storage: Storage, taken: frozenset = frozenset()
) -> Walk:
    """Places everything; what has the batch's shape is found on the way."""
    walk = Walk(program, data_parallel(unit, storage, taken), Rules(ranks, unit))
    while True:
        walk.place_operations()
        found = _constants_sharded_by_some(walk)
        if found.keys() <= walk.sharded_for_some.keys():
            break
        walk.sharded_for_some |= found
        walk.from_batch |= found.keys()
    walk.finish()
    return walk


def _constants_sharded_by_some(walk: Walk) -> dict[fx.Node, Placement]:
    """Constants that one reader takes a slice of and another reads whole: they have the batch's shape.

    The gradient of a sum is ones; its readers must not work on the whole batch on every rank.
    """
    wanted: dict[fx.Node, set[Placement]] = {}
    for node, strategy in walk.chosen.items():
        if meta(node)["phase"] != OPTIMIZER:
            for argument, placement in zip(tensor_arguments(node), strategy.inputs, strict=True):
                wanted.setdefault(argument, set()).add(placement)
    found = {}
    for node in reversed(walk.chosen):
        shards = [kind for kind in wanted.get(node, ()) if isinstance(kind, Shard)]
        if len(shards) != 1 or walk.now[node] != (REPLICATE,) or node in walk.from_batch:
            continue
        if len(wanted[node]) > 1:
            found[node] = shards[0]
        for argument, placement in walk.through_view(node, shards[0]):
            wanted[argument].add(placement)
    return found


def _cost(walk: Walk, node: fx.Node, strategy: Strategy, reads: Sequence[Read]) -> float:
    """Bytes moved between ranks, plus a little for bytes touched and work done on every rank."""
    if node.target in FLEXES and strategy.inputs[0] == Shard(1):
        return float("inf")  # heads are for another kind of parallelism to divide
    cost = 0.0
    adds_up = meta(node).get("accumulates")
    if adds_up and any(
        a.op == "placeholder" and (have,) != strategy.outputs for a, have, _ in reads
    ):
        return float("inf")  # the sum so far stays where it is
    for argument, have, want in reads:
        if adds_up and want == SUM and have != SUM:
            # A gradient that is whole, or sharded, already joins: zero on all ranks but one.
            have, want = SUM, REPLICATE
        cost += redistribution_bytes(meta(argument)["val"], have, want, walk.rules.size)
    # A preset may want the update done on every rank; work on the batch never.
    divided = any(isinstance(p, (Shard, Partial)) for p in strategy.outputs)
    if _is_work_on_the_batch(walk, node) and not divided:
        return with_repeated_work(cost, node, reads)
    return cost


def _is_work_on_the_batch(walk: Walk, node: fx.Node) -> bool:
    update = meta(node)["phase"] == OPTIMIZER or walk.reduced_before(node)
    return node in walk.from_batch and not update


def ranks_that_divide(program: Program) -> int:
    """The fewest ranks that divide the rows of a batch; 1: it has one row, and none do."""
    rows = [
        value.shape[0]
        for role, _, value in program.input_rows
        if isinstance(role, roles.UserInput) and value.shape
    ]
    usual = statistics.mode(rows) if rows else 1
    return next((ranks for ranks in range(2, usual + 1) if usual % ranks == 0), 1)
