"""Runs one SPMD Program on all ranks in one process, collectives computed on the list of ranks.

Every operation is executed for rank 0, 1, ... before the next one; a collective sees all its inputs
at once. No process group, no tensor subclass: a few microseconds an operation more than running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.program.collectives import SHARD_OF, is_collective, mesh_dim_of
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.program.shards import REDUCTIONS, cut

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
            reduced = REDUCTIONS[str(node.args[1])](torch.stack(members))
            answers = [reduced] * len(group)
        elif node.target is torch_internals.REDUCE_SCATTER:
            reduced = REDUCTIONS[str(node.args[1])](torch.stack(members))
            answers = list(reduced.chunk(len(group), 0))
        else:
            raise NotImplementedError(f"lockstep execution of {node.target}")
        for rank, answer in zip(group, answers, strict=True):
            results[rank] = answer
    return results
