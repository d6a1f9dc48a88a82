"""Merges small collectives into flat ones: a call costs what copying megabytes costs.

Which collectives there are stays the Program's business; this says how they are carried out.
"""

import math
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.program.build import Builder
from stepgraph.program.collectives import contiguous
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass
from stepgraph.schedule.buckets import (
    can_run_first,
    can_run_last,
    copied_before,
    copied_behind,
    positions,
)

aten = torch.ops.aten


@program_pass(
    reads="buckets of collectives; positions of their inputs and readers",
    writes=(
        "one flat collective, with ``cat`` before and slices behind it, in place of several "
        "of the same kind, group, type and phase (and of one row length, where they are "
        "tables to be reduced: what computes one can write straight into the ``cat``)"
    ),
)
def merge_small_collectives(program: Program, decision: ScheduleDecision) -> Program:
    """Runs the collectives of each bucket as one flat collective."""
    named = {meta(node)["name"]: node for node in program.operations()}
    position = positions(program)
    for names in decision.buckets:
        members = [named[name] for name in names]
        _merge(program, members, position)
    return program.finish()


def _merge(program: Program, members: list[fx.Node], position: dict[fx.Node, float]) -> None:
    """Where it can: flat collectives before this one may have moved inputs back, or readers up.

    What it adds gets its position.
    """
    if can_run_last(members, position):
        anchor = members[-1]
        for node in (node for member in members for node in copied_behind(member)[::-1]):
            if position[node] < position[anchor]:
                anchor.append(node)
                position[node] = position[anchor] + 0.5
    elif can_run_first(members, position):
        anchor = members[0]
        for node in (node for member in members[1:] for node in copied_before(member)):
            if position[node] > position[anchor]:
                anchor.prepend(node)
                position[node] = position[anchor] - 0.5
    else:
        return
    emit, before = Builder(program, meta(anchor)["phase"], anchor), anchor.prev
    flat = _FLAT[anchor.target](emit, members)
    while (before := before.next) is not anchor:
        position[before] = position[anchor] - 0.5  # the anchor goes, so that is between two others
    for member, part in zip(members, flat, strict=True):
        (wait,) = member.users
        meta(part)["placements"] = meta(wait).get("placements", ())
        wait.replace_all_uses_with(part)
        program.graph.erase_node(wait)
        program.graph.erase_node(member)


def _collective(emit: Builder, members: list[fx.Node], flat: fx.Node) -> fx.Node:
    start = emit(members[0].target, flat, *members[0].args[1:])
    return emit(torch_internals.WAIT, start)


def _reduce_all(emit: Builder, members: list[fx.Node]) -> list[fx.Node]:
    # Whole rows of a ``cat`` are computed there; what is flattened first is copied.
    widths = {
        meta(member)["val"].shape[-1] if meta(member)["val"].dim() > 1 else 0 for member in members
    }
    shape = [-1, *widths] if len(widths) == 1 and widths != {0} else [-1]
    rows = [emit(aten.reshape.default, member.args[0], shape) for member in members]
    flat = _collective(emit, members, emit(aten.cat.default, rows))
    return _slices(emit, flat, [list(meta(member)["val"].shape) for member in members], 0)


def _scatter(emit: Builder, members: list[fx.Node]) -> list[fx.Node]:
    ranks = members[0].args[2]
    rows = [emit(aten.reshape.default, member.args[0], [ranks, -1]) for member in members]
    flat = _collective(emit, members, emit(aten.cat.default, rows, 1))
    line = emit(aten.reshape.default, flat, [-1])
    return _slices(emit, line, [list(meta(member)["val"].shape) for member in members], 0)


def _gather(emit: Builder, members: list[fx.Node]) -> list[fx.Node]:
    ranks = members[0].args[1]
    rows = [emit(aten.reshape.default, member.args[0], [-1]) for member in members]
    flat = _collective(emit, members, emit(aten.cat.default, rows))
    table = emit(aten.reshape.default, flat, [ranks, -1])
    return _slices(emit, table, [list(meta(member)["val"].shape) for member in members], 1)


def _slices(emit: Builder, flat: fx.Node, shapes: list[list[int]], dim: int) -> list[fx.Node]:
    """Slices of a flat result along ``dim``, in the members' shapes."""
    parts, start = [], 0
    across = math.prod(size for i, size in enumerate(meta(flat)["val"].shape) if i != dim)
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
