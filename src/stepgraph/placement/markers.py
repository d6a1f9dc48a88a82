"""Parameters of one graph of many become gathers and reductions: the markers' own meaning, spelled out.

reads: ``unshard`` and ``reduce_grad``. writes: casts, ``all_gather``, ``reduce_scatter``, ``all_reduce`` on
the mesh dimension that a marker names, and the padding of uneven shards. preserves: every result.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.program.build import Builder
from stepgraph.program.collectives import redistribute
from stepgraph.program.layout import chunk_size
from stepgraph.program.markers import REDUCE_GRAD, UNSHARD
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program

aten = torch.ops.aten


def place_markers(program: Program) -> Program:
    """Replaces every marker by the collectives it stands for; see the module docstring."""
    gathered: dict[tuple, fx.Node] = {}
    for node in list(program.operations()):
        if node.target not in (UNSHARD, REDUCE_GRAD):
            continue
        emit = Builder(program, node.meta["phase"], node)
        emit.module = node.meta["module"]
        if node.target is REDUCE_GRAD:
            placed = _reduced(emit, *node.args)
        elif (
            placed := gathered.get(node.args)
        ) is None:  # a module that is called twice reads it twice
            placed = gathered[node.args] = _gathered(emit, *node.args)
        if any(user.op == "output" for user in node.users) and placed.op == "placeholder":
            placed = emit(aten.clone.default, placed)  # a result of the graph is no input of it
        node.replace_all_uses_with(placed)
    name_operations(program.graph)
    return program.finish()


def _gathered(emit: Builder, part, shape, dtype, _, ranks, group, mesh_dim) -> fx.Node:
    node = emit.cast(part, dtype)
    shape = list(shape)
    if ranks == 1 or list(part.meta["val"].shape) == shape:
        return node
    padded = _padded(emit, node, chunk_size(shape[0], ranks))
    return redistribute(emit, padded, Shard(0), Replicate(), mesh_dim, ranks, shape[0])


def _reduced(
    emit: Builder, gradient, shape, dtype, reduce_dtype, ranks, group, mesh_dim
) -> fx.Node:
    shape = list(shape)
    node = gradient
    if ranks > 1:
        node = emit.cast(gradient, reduce_dtype)
        whole = shape == list(gradient.meta["val"].shape)
        target = Replicate() if whole else Shard(0)
        node = redistribute(emit, node, Partial("avg"), target, mesh_dim, ranks, 0)
    if node.meta["val"].shape[:1] != tuple(shape[:1]):
        node = emit(aten.slice.Tensor, node, 0, 0, shape[0])
    return emit.cast(node, dtype)


def _padded(emit: Builder, node: fx.Node, rows: int) -> fx.Node:
    value = node.meta["val"]
    missing = rows - value.shape[0]
    if not missing:
        return node
    pads = [0, 0] * (value.dim() - 1) + [0, missing]
    return emit(aten.constant_pad_nd.default, node, pads, 0.0)
