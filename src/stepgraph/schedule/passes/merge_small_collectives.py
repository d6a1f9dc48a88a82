"""Merges small collectives into flat ones: a call costs what copying megabytes costs.

Which collectives there are stays the Program's business; this says how they are carried out.

reads: collectives, their inputs' and readers' positions. writes: one flat collective, with ``cat``
before and slices behind it, in place of several of the same kind, group, type and phase (and of one row
length, where they are tables to be reduced: what computes one can write straight into the ``cat``).
preserves: every result, bitwise (each element is reduced over the same ranks in the same order).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.collectives import moved_bytes
from stepgraph.program.build import Builder
from stepgraph.program.collectives import contiguous
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program

aten = torch.ops.aten

# Bytes of one flat collective's larger side. Reductions end in long-lived gradients, so a large one
# costs no memory; gathers bring parameters early, which does.
LARGEST: dict[Any, int] = {
    torch_internals.ALL_REDUCE: 8 * 2**20,
    torch_internals.REDUCE_SCATTER: 8 * 2**20,
    torch_internals.ALL_GATHER: 4 * 2**20,
}
# Below this a copy costs less than one more collective.
TABLE = 256 * 2**10
# Above this a collective gains nothing from company, and loses a copy.
LARGE = 4 * 2**20


@dataclass
class _Bucket:
    key: tuple
    members: list[fx.Node] = field(default_factory=list)
    size: int = 0


def merge_small_collectives(program: Program) -> Program:
    """Replaces runs of small collectives by flat ones; see the module docstring."""
    position = _positions(program)
    open_buckets: dict[tuple, _Bucket] = {}
    closed: list[_Bucket] = []
    for node in list(program.operations()):
        limit = LARGEST.get(node.target)
        size = moved_bytes(node) if limit else 0
        if not limit or size > LARGE:
            continue
        key = (node.target, node.args[1:], node.meta["val"].dtype, node.meta["phase"], _width(node))
        bucket = open_buckets.get(key)
        if bucket is None or bucket.size + size > limit or not _fits(bucket, node, position):
            if bucket is not None:
                closed.append(bucket)
            bucket = open_buckets[key] = _Bucket(key)
        bucket.members.append(node)
        bucket.size += size
    for bucket in [*closed, *open_buckets.values()]:
        if len(bucket.members) > 1 and _merge(program, bucket, position):
            position = _positions(program)
    name_operations(program.graph)
    return program.finish()


def _width(node: fx.Node) -> int:
    """The row length of a table to be reduced, which goes below others of that length; else 0.

    A matmul whose result is whole rows of a ``cat`` is computed there by inductor; flattened, it would be
    copied.
    """
    value = node.meta["val"]
    table = (
        node.target is torch_internals.ALL_REDUCE and value.dim() > 1 and moved_bytes(node) >= TABLE
    )
    return value.shape[-1] if table else 0


def _positions(program: Program) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(program.graph.nodes)}


def _first_reader(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """Where the result of a collective is first read, past its wait."""
    (wait,) = node.users
    return min((position[reader] for reader in wait.users), default=len(position))


def _can_run_last(members: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """Whether all can run where the last one stands: nobody reads any of them before."""
    last = position[members[-1]]
    return all(_first_reader(member, position) > last for member in members)


def _can_run_first(members: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """Whether all can run where the first one stands: their inputs are there."""
    first = position[members[0]]
    return all(position[member.args[0]] < first for member in members)  # type: ignore[index]


def _fits(bucket: _Bucket, node: fx.Node, position: dict[fx.Node, int]) -> bool:
    members = [*bucket.members, node]
    return _can_run_last(members, position) or _can_run_first(members, position)


def _merge(program: Program, bucket: _Bucket, position: dict[fx.Node, int]) -> bool:
    """Whether it could: flat collectives before this one may have moved inputs back, or readers up."""
    members = bucket.members
    if _can_run_last(members, position):
        anchor = members[-1]
    elif _can_run_first(members, position):
        anchor = members[0]
    else:
        return False
    emit = Builder(program, anchor.meta["phase"], anchor)
    flat = _FLAT[anchor.target](emit, members)
    for member, part in zip(members, flat, strict=True):
        (wait,) = member.users
        part.meta["placements"] = wait.meta.get("placements", ())
        wait.replace_all_uses_with(part)
        program.graph.erase_node(wait)
        program.graph.erase_node(member)
    return True


def _collective(emit: Builder, members: list[fx.Node], flat: fx.Node) -> fx.Node:
    start = emit(members[0].target, flat, *members[0].args[1:])
    return emit(torch_internals.WAIT, start)


def _reduce_all(emit: Builder, members: list[fx.Node]) -> list[fx.Node]:
    width = _width(members[0])
    shape = [-1, width] if width else [-1]
    rows = [emit(aten.reshape.default, member.args[0], shape) for member in members]
    flat = _collective(emit, members, emit(aten.cat.default, rows))
    return _cut(emit, flat, [list(member.meta["val"].shape) for member in members], 0)


def _scatter(emit: Builder, members: list[fx.Node]) -> list[fx.Node]:
    ranks = members[0].args[2]
    rows = [emit(aten.reshape.default, member.args[0], [ranks, -1]) for member in members]
    flat = _collective(emit, members, emit(aten.cat.default, rows, 1))
    line = emit(aten.reshape.default, flat, [-1])
    return _cut(emit, line, [list(member.meta["val"].shape) for member in members], 0)


def _gather(emit: Builder, members: list[fx.Node]) -> list[fx.Node]:
    ranks = members[0].args[1]
    rows = [emit(aten.reshape.default, member.args[0], [-1]) for member in members]
    flat = _collective(emit, members, emit(aten.cat.default, rows))
    table = emit(aten.reshape.default, flat, [ranks, -1])
    return _cut(emit, table, [list(member.meta["val"].shape) for member in members], 1)


def _cut(emit: Builder, flat: fx.Node, shapes: list[list[int]], dim: int) -> list[fx.Node]:
    """Slices of a flat result along ``dim``, in the members' shapes."""
    parts, start = [], 0
    across = math.prod(size for i, size in enumerate(flat.meta["val"].shape) if i != dim)
    for shape in shapes:
        length = torch.Size(shape).numel() // across
        piece = emit(aten.slice.Tensor, flat, dim, start, start + length)
        # As a collective gives it: a reader may view it.
        parts.append(contiguous(emit, emit(aten.reshape.default, piece, shape)))
        start += length
    return parts


_FLAT: dict[Any, Any] = {
    torch_internals.ALL_REDUCE: _reduce_all,
    torch_internals.REDUCE_SCATTER: _scatter,
    torch_internals.ALL_GATHER: _gather,
}
