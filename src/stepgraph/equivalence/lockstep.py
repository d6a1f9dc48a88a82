"""Runs one SPMD Program on all ranks in one process, collectives computed on the list of ranks.

Every operation is executed for rank 0, 1, ... before the next one; a collective sees all its inputs
at once. No process group, no tensor subclass: a few microseconds an operation more than running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph import torch_internals
from stepgraph.program.collectives import SHARD_OF, is_collective, mesh_dim_of
from stepgraph.program.layout import MeshShape, Placements, chunk_size
from stepgraph.program.program import Program

_REDUCE = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0) / stack.shape[0],
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def run_lockstep(
    program: Program, inputs: Sequence[Sequence[torch.Tensor]], observe: Any = None
) -> list[list[Any]]:
    """Executes a Program on all ranks of its mesh.

    Args:
        program: placed, or global (then one rank runs it).
        inputs: for every rank, its local inputs in the Program's order.
        observe: called as ``observe(node, values of all ranks)`` after every operation.

    Returns:
        for every rank, its local results.
    """
    mesh = program.mesh or MeshShape((("dp", 1),))
    ranks = range(len(inputs))
    environment: dict[fx.Node, list[Any]] = {}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for argument in node.all_input_nodes:
            last_use[argument] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last_use.items():
        dying.setdefault(reader, []).append(value)

    position = 0
    for node in program.graph.nodes:
        if node.op == "placeholder":
            environment[node] = [inputs[rank][position] for rank in ranks]
            position += 1
        elif node.op == "get_attr":
            environment[node] = [getattr(program.module, node.target)] * len(inputs)
        elif node.op == "call_function":
            environment[node] = _run_node(node, environment, mesh, len(inputs))
            if observe is not None:
                observe(node, environment[node])
        else:
            results = node.args[0]
            return [[environment[result][rank] for result in results] for rank in ranks]
        for value in dying.get(node, ()):
            environment.pop(value, None)
    raise AssertionError("a graph without an output")


def _run_node(node: fx.Node, environment: dict, mesh: MeshShape, ranks: int) -> list[Any]:
    if is_collective(node):
        return _run_collective(node, environment[node.args[0]], mesh)
    if node.target is torch_internals.WAIT:
        return environment[node.args[0]]
    if node.target is SHARD_OF:
        _, dim, size, mesh_dim = node.args
        axis = mesh.names.index(mesh_dim)
        return [
            cut(value, dim, size, mesh.coordinate(rank)[axis])
            for rank, value in enumerate(environment[node.args[0]])
        ]
    return [
        node.target(
            *fx.node.map_arg(node.args, lambda a, rank=rank: environment[a][rank]),
            **fx.node.map_arg(node.kwargs, lambda a, rank=rank: environment[a][rank]),
        )
        for rank in range(ranks)
    ]


def _run_collective(node: fx.Node, values: list[torch.Tensor], mesh: MeshShape) -> list[Any]:
    results: list[Any] = [None] * len(values)
    for group in mesh.groups(mesh_dim_of(node)):
        members = [values[rank] for rank in group]
        if node.target is torch_internals.ALL_GATHER:
            whole = torch.cat(members, 0)
            answers = [whole] * len(group)
        elif node.target is torch_internals.ALL_REDUCE:
            reduced = _REDUCE[str(node.args[1])](torch.stack(members))
            answers = [reduced] * len(group)
        elif node.target is torch_internals.REDUCE_SCATTER:
            reduced = _REDUCE[str(node.args[1])](torch.stack(members))
            answers = list(reduced.chunk(len(group), 0))
        else:
            raise NotImplementedError(f"lockstep execution of {node.target}")
        for rank, answer in zip(group, answers, strict=True):
            results[rank] = answer
    return results


def cut(value: torch.Tensor, dim: int, ranks: int, index: int) -> torch.Tensor:
    """Rank ``index``'s part of a whole tensor: equal rows of ``dim``, zero-padded at the end."""
    rows = chunk_size(value.shape[dim], ranks)
    start = min(index * rows, value.shape[dim])
    part = value.narrow(dim, start, min(rows, value.shape[dim] - start))
    if part.shape[dim] == rows:
        return part.contiguous()
    shape = list(part.shape)
    shape[dim] = rows - shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def split(value: torch.Tensor, placements: Placements, mesh: MeshShape) -> list[torch.Tensor]:
    """All ranks' local parts of a global tensor (a pending sum: whole on the first rank)."""
    parts = []
    for rank in range(mesh.world_size):
        part = value
        for axis, placement in enumerate(placements):
            index = mesh.coordinate(rank)[axis]
            if isinstance(placement, Shard):
                part = cut(part, placement.dim, mesh.sizes[axis], index)
            elif isinstance(placement, Partial) and index:
                part = torch.zeros_like(part)
        parts.append(part.clone())
    return parts


def join(
    parts: Sequence[torch.Tensor], shape: Sequence[int], placements: Placements, mesh: MeshShape
) -> torch.Tensor:
    """The global tensor that local parts stand for; replicas must agree bit for bit.

    Raises:
        AssertionError: if ranks that hold the same replica differ.
    """
    held = {mesh.coordinate(rank): part for rank, part in enumerate(parts)}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        merged: dict[tuple[int, ...], torch.Tensor] = {}
        for prefix in dict.fromkeys(key[:axis] for key in held):
            members = [held[(*prefix, i)] for i in range(mesh.sizes[axis])]
            if isinstance(placement, Shard):
                merged[prefix] = torch.cat(members, placement.dim)
            elif isinstance(placement, Partial):
                merged[prefix] = _REDUCE[placement.reduce_op](torch.stack(members))
            else:
                assert isinstance(placement, Replicate)
                same = all(torch.equal(members[0], m) or _both_nan(members[0], m) for m in members)
                assert same, "ranks that hold the same replica differ"
                merged[prefix] = members[0]
        held = merged
    whole = held[()]
    for dim, size in enumerate(shape):
        whole = whole.narrow(dim, 0, size)
    return whole


def _both_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())
