"""Updates each parameter as soon as its gradient is there, while the backward goes on.

So gradients do not pile up until the backward is done: their memory serves the next ones. An update that
needs all gradients (clipping) stays behind all of them, and what updates send (ZeRO's new parameters)
where it is: all of it at once, in few messages.

An update starts where it was decided for each value that it reads, and not before the last reader of what
it overwrites. States that wait on the host are on their way from there as the update before begins, and on
their way back until the next one does.
"""

import itertools

from torch import fx

from stepgraph.operators.views import storage_roots
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import TO_DEVICE, WAIT_COPY, is_on_host
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program
from stepgraph.program.record import program_pass
from stepgraph.torch_internals.code import inputs_of


@program_pass(
    reads="phases; where updates may start; readers of what is overwritten",
    writes="the order of the optimizer's operations",
)
def update_early(program: Program, decision: ScheduleDecision) -> Program:
    """Moves the optimizer's operations up; see the module docstring."""
    if decision.updates is None:
        return program
    operations = list(program.operations())
    position = {node: i for i, node in enumerate(operations)}
    named = {meta(node)["name"]: i for node, i in position.items()}
    others = [node for node in operations if meta(node)["phase"] != OPTIMIZER]
    starts = decision.updates
    # Inputs and constants are there before all of them.
    place = {
        node: named.get(starts[meta(node)["name"]], position[node])
        for node in others
        if meta(node)["name"] in starts
    }
    not_before = _last_readers(program, position)
    updates = [node for node in operations if meta(node)["phase"] == OPTIMIZER]
    for node in updates:
        after = [place.get(source, -1) for source in inputs_of(node)]
        early = max([*after, not_before.get(node, -1)], default=-1)
        place[node] = max(early, position[node]) if is_collective(node) else early
    for node in reversed(updates):  # what reads no gradient (decayed moments): where it is read
        if place[node] == -1:
            place[node] = min((place[user] for user in node.users if user in place), default=-1)
    coming = [node for node in updates if node.target is TO_DEVICE]
    there = [node for node in updates if node.target is WAIT_COPY and is_on_host(node)]
    pairs = [*itertools.pairwise(sorted({place[node] for node in coming}))]
    earlier, later = {b: a for a, b in pairs}, dict(pairs)
    place |= {node: earlier.get(place[node], place[node]) for node in coming}
    place |= {node: later.get(place[node], place[node]) for node in there}
    order = {node: (position[node], 0) for node in others}
    output = program.graph.output_node()
    for node in sorted(operations, key=lambda node: order.get(node) or (place[node], 1)):
        output.prepend(node)
    return program.finish()


def _last_readers(program: Program, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each new state: where what it overwrites is last read, by all but the optimizer."""
    root = storage_roots(program)
    last: dict[fx.Node, int] = {}
    for node, place in position.items():
        if meta(node)["phase"] != OPTIMIZER:
            last |= dict.fromkeys((root[source] for source in inputs_of(node)), place)
    inputs = {role: node for role, node, _ in program.input_rows}
    return {
        node: last.get(inputs[written], -1)
        for role, node, _ in program.output_rows
        if (written := roles.written_input(role)) in inputs
    }
