"""Applies a memory decision: optimizer states that wait on the host from one update to the next.

Before its update a state is copied to the device, and what it becomes is copied back behind it; as long as
the forward and the backward run it takes no memory there. It comes while the update before it runs, and
goes while the next one does.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from torch import fx

from stepgraph.cost.work import size_in_bytes
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program import roles
from stepgraph.program.build import Builder, following
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, Value
from stepgraph.program.record import program_pass


@program_pass(
    reads="``offload`` of a :class:`MemoryDecision`: labels of optimizer states; who reads them",
    writes=(
        "``to_device`` before the first reader of each, ``to_host`` behind what it becomes, each with its "
        "``wait_copy``; results"
    ),
)
def offload_states(program: Program, decision: MemoryDecision) -> Program:
    """Lets states wait on the host; see the module docstring."""
    wanted = {*(decision.offload or ())}
    moved = [row for row in states_of(program) if roles.label(row[0]) in wanted]
    if not moved:
        return program
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    readers = {
        node: sorted((u for u in node.users if u.op == "call_function"), key=place.__getitem__)
        for _, node, _ in moved
    }
    firsts = sorted({read[0] for read in readers.values()}, key=place.__getitem__)
    number = {first: i for i, first in enumerate(firsts)}
    results = list(program.results)
    becomes = dict(zip(program.outputs, results, strict=True))
    for role, node, value in moved:
        first = readers[node][0]
        emit = _emitter(program, value, firsts[max(number[first] - 1, 0)])
        coming = emit(TO_DEVICE, node, meta(node)["val"].device)
        emit = _emitter(program, value, first)
        there = emit(WAIT_COPY, coming, node)
        for reader in readers[node]:
            reader.replace_input_with(node, there)
        new = becomes.get(roles.NewOptimizerState(role.owner, role.key), node)
        if new is node:
            continue
        behind = following(new)
        sent = _emitter(program, value, behind)(TO_HOST, new)
        then = firsts[number[first] + 2] if number[first] + 2 < len(firsts) else None
        if then is not None and place[then] <= place[new]:
            then = behind
        held = _emitter(program, value, then)(WAIT_COPY, sent, new)
        results = [held if one is new else one for one in results]
    program.graph.output_node().args = (tuple(results),)
    return program.finish()


def states_of(program: Program) -> list[tuple[roles.OptimizerState, fx.Node, Value]]:
    """Optimizer states that can wait on the host: those of whole parameters, and not numbers."""
    return [
        (role, node, value)
        for role, node, value in program.input_rows
        if isinstance(role, roles.OptimizerState)
        and value.shape
        and any(user.op == "call_function" for user in node.users)
    ]


def names_of_states(program: Program, enough: float = inf) -> tuple[str, ...]:
    """Of the largest, as many as take so many bytes of a rank; their labels."""
    found: list[str] = []
    for role, node, _ in sorted(
        states_of(program), key=lambda row: -size_in_bytes(meta(row[1])["val"])
    ):
        if enough <= 0:
            break
        enough -= size_in_bytes(meta(node)["val"])
        found.append(roles.label(role))
    return tuple(sorted(found))


def _emitter(program: Program, state: Value, before: fx.Node | None) -> Callable[..., fx.Node]:
    """Emits operations on a state, placed as it is; by default, at the end."""
    build = Builder(program, OPTIMIZER, before)

    def emit(*operation: Any) -> fx.Node:
        node = build(*operation)
        if state.placements is not None:
            meta(node)["placements"] = (state.placements,)
        return node

    return emit
