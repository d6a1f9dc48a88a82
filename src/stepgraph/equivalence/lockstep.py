"""Runs the programs of all ranks in one process, stepped in lockstep.

Each rank interprets its own graph up to its next collective; when all stand at one, it is computed on
the list of their values and they go on. No process group, no tensor subclass: a few microseconds an
operation more than running it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.program.collectives import KINDS, ON_FIRST, SHARD_OF, is_collective, mesh_dim_of
from stepgraph.program.layout import MeshShape, chunk_size, data_mesh
from stepgraph.program.markers import REDUCE_GRAD, UNSHARD
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, runnable
from stepgraph.program.randomness import RANDOM, bound_to
from stepgraph.program.shards import REDUCTIONS, slice_of

EXCHANGE = "exchange"  # what markers do: each rank gets what all bring

Observer = Callable[[int, fx.Node, Any], None]


def run_lockstep(
    programs: Program | Sequence[Program],
    inputs: Sequence[Sequence[torch.Tensor]],
    observe: Observer | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> list[list[Any]]:
    """Executes one Program on all ranks of its mesh, or every rank's own.

    Args:
        programs: one for all ranks, or one per rank. Groups are named by mesh dimensions.
        inputs: for every rank, its local inputs in the Program's order.
        observe: called as ``observe(rank, node, value)`` after every operation.
        replaced: by stable name: ``f(node, arguments, keywords) -> value`` in place of an operation.

    Returns:
        for every rank, its local results.

    Raises:
        AssertionError: ranks stand at different collectives (on real ranks: a deadlock).
    """
    if isinstance(programs, Program):
        programs = [programs] * len(inputs)
    mesh = programs[0].mesh or data_mesh(1)
    different = {id(program): program for program in programs}
    dying = {key: _last_readers(program.graph) for key, program in different.items()}
    runs = [
        _interpret(program, dying[id(program)], rank, mesh, inputs[rank], observe, replaced or {})
        for rank, program in enumerate(programs)
    ]
    answers: list[Any] = [None] * len(runs)
    while True:
        waiting: list[tuple[fx.Node, torch.Tensor]] = []
        finished: list[list[Any]] = []
        for run, answer in zip(runs, answers, strict=True):
            try:
                waiting.append(run.send(answer))
            except StopIteration as stop:
                finished.append(stop.value)
        if finished:
            assert not waiting, "some ranks wait at a collective that others never reach"
            return finished
        nodes, values = map(list, zip(*waiting, strict=True))
        answers = compute_collective(nodes, values, mesh)


def run_rank(
    program: Program,
    rank: int,
    inputs: Sequence[torch.Tensor],
    exchange: Callable[[fx.Node, torch.Tensor, MeshShape], Any],
    observe: Observer | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Executes one rank's Program where the others run in processes of their own.

    Args:
        exchange: what a collective gives this rank for what it brings.
        inputs, observe, replaced: as for :func:`run_lockstep`.
    """
    mesh = program.mesh or data_mesh(1)
    dying = _last_readers(program.graph)
    run = _interpret(program, dying, rank, mesh, inputs, observe, replaced or {})
    answer = None
    while True:
        try:
            node, value = run.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = exchange(node, value, mesh)


def _interpret(
    program: Program,
    dying: dict[fx.Node, list[fx.Node]],
    rank: int,
    mesh: MeshShape,
    inputs: Sequence[torch.Tensor],
    observe: Observer | None,
    replaced: Mapping[str, Any],
) -> Generator[tuple[fx.Node, torch.Tensor], Any, list[Any]]:
    """One rank: yields (collective, its input), takes the collective's result."""
    values: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "output":
            return [values[result] for result in node.args[0]]
        if node.op == "placeholder":
            values[node] = next(remaining)
            continue
        if node.op == "get_attr":
            values[node] = getattr(program.module, node.target)
        elif (stand_in := replaced.get(meta(node).get("name", ""))) is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = stand_in(node, args, kwargs)
        elif is_collective(node):
            result = yield node, values[node.args[0]]
            if "out" in node.kwargs:
                result = values[node.kwargs["out"]].copy_(result)
            values[node] = result
        elif node.target in (UNSHARD, REDUCE_GRAD):
            args, _ = fx.node.map_arg((node.args, {}), values.__getitem__)
            index = mesh.position(rank)[mesh_dim_of(node)] if mesh.world_size > 1 else 0
            values[node] = yield from _marked(node, args, index)
        elif node.target is torch_internals.WAIT:
            values[node] = values[node.args[0]]
        elif node.target is SHARD_OF:
            value, dim, ranks, mesh_dim = node.args
            index = mesh.position(rank)[mesh_dim]
            values[node] = slice_of(values[value], dim, ranks, index)
        elif node.target is ON_FIRST:
            index = mesh.position(rank)[node.args[1]]
            values[node] = torch.zeros_like(values[node.args[0]]) if index else values[node.args[0]]
        elif node.target is RANDOM:
            bound = bound_to(node, mesh.position(rank), dict(mesh.dims))
            values[node] = RANDOM(values[bound[0]], *bound[1:])
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = runnable(node.target)(*args, **kwargs)
        if observe is not None:
            observe(rank, node, values[node])
        for dead in dying.get(node, ()):
            del values[dead]
    raise AssertionError("a graph without an output")


def _marked(
    node: fx.Node, args: tuple, index: int
) -> Generator[tuple[fx.Node, torch.Tensor], Any, Any]:
    """What a marker computes on a rank: of what all ranks bring, where each has its own."""
    value, shape, dtype, reduce_dtype, in_parts, ranks, *_ = args
    if ranks == 1 or (node.target is UNSHARD and not in_parts):
        return node.target(value, shape, dtype, reduce_dtype, in_parts, 1, *args[6:])  # type: ignore
    if node.target is UNSHARD:
        parts = yield node, value.to(dtype)
        return torch.cat(parts)[: shape[0]]
    parts = yield node, value.to(reduce_dtype)
    mean = (torch.stack(parts).sum(0) / ranks).to(dtype)
    start = index * chunk_size(value.shape[0], ranks) if in_parts else 0
    return mean[start : start + shape[0]] if in_parts else mean


def _last_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every operation, the values that nobody reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last |= dict.fromkeys(node.all_input_nodes, node)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        dying.setdefault(reader, []).append(value)
    return dying


def compute_collective(
    nodes: list[fx.Node], values: list[torch.Tensor], mesh: MeshShape
) -> list[Any]:
    """What each rank gets of a collective.

    Args:
        nodes, values: every rank's own, and what it brings.

    Raises:
        AssertionError: they are different collectives.
    """
    kinds = {(KINDS.get(node.target, EXCHANGE), mesh_dim_of(node)) for node in nodes}
    assert len(kinds) == 1, f"ranks stand at different collectives: {kinds}"
    ((kind, mesh_dim),) = kinds
    node = nodes[0]
    results: list[Any] = [None] * len(values)
    for group in mesh.groups(mesh_dim):
        members = [values[rank] for rank in group]
        if kind == EXCHANGE:
            for rank in group:
                results[rank] = [member.clone() for member in members]
            continue
        assert len({member.shape for member in members}) == 1, "ranks bring different shapes"
        if kind == "all_gather":
            answers = [torch.cat(members, 0)] * len(group)
        elif kind == "all_reduce":
            answers = [REDUCTIONS[str(node.args[1])](torch.stack(members))] * len(group)
        elif kind == "reduce_scatter":
            reduced = REDUCTIONS[str(node.args[1])](torch.stack(members))
            answers = list(reduced.chunk(len(group), 0))
        elif kind == "all_to_all":
            sent = [member.chunk(len(group), 0) for member in members]
            answers = [torch.cat(parts, 0) for parts in zip(*sent, strict=True)]
        else:
            raise NotImplementedError(f"lockstep execution of {node.target}")
        for rank, answer in zip(group, answers, strict=True):
            # Each rank gets memory of its own, as it would: somebody may write into it.
            results[rank] = answer.clone()
    return results
