"""Parameters of one graph of many become gathers and reductions: the markers' own meaning, spelled out."""

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.program.build import Builder
from stepgraph.program.collectives import redistribute
from stepgraph.program.layout import chunk_size
from stepgraph.program.markers import REDUCE_GRAD, UNSHARD
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import SUMMATION, program_pass

aten = torch.ops.aten


@program_pass(
    reads="``unshard`` and ``reduce_grad``",
    writes=(
        "casts, ``all_gather``, ``reduce_scatter``, ``all_reduce`` on the mesh dimension "
        "that a marker names, and the padding of uneven shards"
    ),
    preserves=SUMMATION,
)
def place_markers(program: Program) -> Program:
    """Replaces every marker by the collectives it stands for; see the module docstring."""
    gathered: dict[tuple, fx.Node] = {}
    for node in list(program.operations()):
        if node.target not in (UNSHARD, REDUCE_GRAD):
            continue
        emit = Builder(program, meta(node)["phase"], node)
        emit.module = meta(node)["module"]
        if node.target is REDUCE_GRAD:
            placed = _reduced(emit, *node.args)
        else:  # a module that is called twice reads it twice
            if node.args not in gathered:
                gathered[node.args] = _gathered(emit, *node.args)
            placed = gathered[node.args]
        if any(user.op == "output" for user in node.users) and placed.op == "placeholder":
            placed = emit(aten.clone.default, placed)  # a result of the graph is no input of it
        node.replace_all_uses_with(placed)
    return program.finish()


def _gathered(emit: Builder, part, shape, dtype, _, in_parts, ranks, group, mesh_dim) -> fx.Node:
    node = emit.cast(part, dtype)
    if ranks == 1 or not in_parts:
        return node
    padded = _padded(emit, node, shape[0], ranks)
    return redistribute(emit, padded, Shard(0), Replicate(), mesh_dim, ranks, shape[0])


def _reduced(
    emit: Builder, gradient, shape, dtype, reduce_dtype, in_parts, ranks, group, mesh_dim
) -> fx.Node:
    if ranks == 1:
        return emit.cast(gradient, dtype)
    node = emit.cast(gradient, reduce_dtype)
    target = Shard(0) if in_parts else Replicate()
    node = redistribute(emit, node, Partial("avg"), target, mesh_dim, ranks, 0)
    if in_parts and meta(gradient)["val"].shape[0] % ranks:
        node = emit(aten.slice.Tensor, node, 0, 0, shape[0])
    return emit.cast(node, dtype)


def _padded(emit: Builder, part: fx.Node, rows: int, ranks: int) -> fx.Node:
    """This rank's rows as long as any rank's. All ranks pad, if one must: their programs stay alike."""
    if rows % ranks == 0:
        return part
    value = meta(part)["val"]
    pads = [0, 0] * (value.dim() - 1) + [0, chunk_size(rows, ranks) - value.shape[0]]
    return emit(aten.constant_pad_nd.default, part, pads, 0.0)
