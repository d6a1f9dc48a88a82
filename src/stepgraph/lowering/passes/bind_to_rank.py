"""Binds an SPMD Program to one rank: slices at its position."""

import torch
from torch import fx

from stepgraph.program.build import Builder
from stepgraph.program.collectives import ON_FIRST, SHARD_OF, mesh_dim_of
from stepgraph.program.layout import chunk_size
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM, bound_to
from stepgraph.program.record import program_pass

aten = torch.ops.aten


@program_pass(
    reads="mesh dimension names",
    writes=(
        "``slice`` (and padding) in place of ``shard_of``, the value or zeros in place of "
        "``on_first``; where a random part starts"
    ),
)
def bind_to_rank(program: Program, rank: int) -> Program:
    """Replaces what is symbolic about ranks.

    Args:
        program: placed on a mesh.
        rank: this rank.
    """
    assert program.mesh is not None
    coordinate = program.mesh.position(rank)
    for node in list(program.operations()):
        if node.target is SHARD_OF:
            _slice(program, node, coordinate[mesh_dim_of(node)])
        elif node.target is ON_FIRST:
            _first_only(program, node, coordinate[mesh_dim_of(node)])
        elif node.target is RANDOM:
            node.args = bound_to(node, coordinate, dict(program.mesh.dims))
    return program.finish()


def _first_only(program: Program, node: fx.Node, index: int) -> None:
    value = node.args[0]
    if index:
        emit = Builder(program, meta(node)["phase"], node)
        emit.module = meta(node)["module"]
        value = emit(aten.zeros_like.default, value)
        meta(value)["placements"] = meta(node).get("placements", ())
    node.replace_all_uses_with(value)  # type: ignore[arg-type]


def _slice(program: Program, node: fx.Node, index: int) -> None:
    value, dim, ranks, _ = node.args
    size = meta(value)["val"].shape[dim]  # type: ignore[union-attr,index]
    rows = chunk_size(size, ranks)  # type: ignore[arg-type]
    start, stop = min(index * rows, size), min((index + 1) * rows, size)
    emit = Builder(program, meta(node)["phase"], node)
    emit.module = meta(node)["module"]
    part = emit(aten.slice.Tensor, value, dim, start, stop)
    if stop - start < rows:
        after = meta(value)["val"].dim() - 1 - dim  # type: ignore[union-attr,operator]
        pads = [0, 0] * after + [0, rows - (stop - start)]
        part = emit(aten.constant_pad_nd.default, part, pads, 0)
    if not meta(part)["val"].is_contiguous():
        part = emit(aten.clone.default, part, memory_format=torch.contiguous_format)
    meta(part)["placements"] = meta(node).get("placements", ())
    node.replace_all_uses_with(part)
