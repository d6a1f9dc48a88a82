"""Updates each parameter as soon as its gradient is there, while the backward goes on.

So gradients do not pile up until the backward is done: their memory serves the next ones. An update that
needs all gradients (clipping) stays behind all of them, and what updates send (ZeRO's new parameters)
where it is: all of it at once, in few messages.

An update starts behind the next collective after the one that it reads: that is on its way by then, and the
work between has hidden the first. It also waits for the last reader of what it overwrites.

reads: phases, collectives, readers of what is overwritten. writes: the order of the optimizer's operations.
preserves: every result, bitwise.
"""

from __future__ import annotations

import itertools

from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.views import PARTS_OF_A_RESULT, storage_roots
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.names import name_operations
from stepgraph.program.program import OPTIMIZER, Program


def update_early(program: Program) -> Program:
    """Moves the optimizer's operations up; see the module docstring."""
    operations = list(program.operations())
    position = {node: i for i, node in enumerate(operations)}
    others = [node for node in operations if node.meta["phase"] != OPTIMIZER]
    place = _awaited(others, position)  # inputs and constants are there before all of them
    not_before = _last_readers(program, position)
    updates = [node for node in operations if node.meta["phase"] == OPTIMIZER]
    for node in updates:
        after = [place.get(source, -1) for source in node.all_input_nodes]
        early = max([*after, not_before.get(node, -1)], default=-1)
        place[node] = max(early, position[node]) if is_collective(node) else early
    for node in reversed(updates):  # what reads no gradient (decayed moments): where it is read
        if place[node] == -1:
            place[node] = min((place[user] for user in node.users if user in place), default=-1)
    order = {node: (position[node], 0) for node in others}
    output = program.graph.output_node()
    for node in sorted(operations, key=lambda node: order.get(node) or (place[node], 1)):
        output.prepend(node)
    name_operations(program.graph)
    return program.finish()


def _awaited(operations: list[fx.Node], position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Where each result is there without waiting: a collective's, where the next has started."""
    collectives = [node for node in operations if is_collective(node)]
    following = dict(itertools.pairwise(collectives))
    place: dict[fx.Node, int] = {}
    for node in operations:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target is torch_internals.WAIT:
            place[node] = position[following.get(source, node)]  # type: ignore[arg-type]
        elif node.target in PARTS_OF_A_RESULT and source in place:
            place[node] = max(place[source], position[node])
        else:
            place[node] = position[node]
    return place


def _last_readers(program: Program, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each new state: where what it overwrites is last read, by all but the optimizer."""
    root = storage_roots(program)
    last: dict[fx.Node, int] = {}
    for node, place in position.items():
        if node.meta["phase"] != OPTIMIZER:
            last |= dict.fromkeys((root[source] for source in node.all_input_nodes), place)
    inputs = dict(zip(program.inputs, program.placeholders, strict=True))
    return {
        node: last.get(inputs[written], -1)
        for role, node in zip(program.outputs, program.results, strict=True)
        if (written := roles.written_input(role)) in inputs
    }
