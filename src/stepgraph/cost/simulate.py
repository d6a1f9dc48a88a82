"""The time of one Program: streams of compute and communication, walked in graph order.

Communication inside nodes and between them goes over different wires, by different communicators: each is
a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from stepgraph import torch_internals
from stepgraph.cost.collectives import collective_of, collective_seconds, links
from stepgraph.cost.devices import Device
from stepgraph.cost.traffic import is_view
from stepgraph.cost.work import node_flops, operation_seconds, runs_no_kernel
from stepgraph.program.collectives import is_collective
from stepgraph.program.program import PHASES, Program

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True)
class Event:
    """One operation on its stream; times in seconds from the start of the Program."""

    node: fx.Node
    stream: str
    start: float
    seconds: float


@dataclass
class StepTimeline:
    """When a Program's operations run.

    ``seconds`` is the whole; ``exposed_seconds`` the part in which compute stood still for a collective.
    ``seconds_by_phase`` is the compute stream's time, waiting included, by phase: it adds up to the whole.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flops: float = 0.0
    events: list[Event] = field(default_factory=list)


def simulate(
    program: Program,
    device: Device,
    operation_time: Callable[[fx.Node, Device], float] = operation_seconds,
) -> StepTimeline:
    """Walks a placed Program in graph order.

    A collective starts when compute has reached it and its communication stream is free. Compute stops
    at the first reader of its result until it is done: waits are delayed to their readers when the
    Program is lowered. Where the device does not overlap, compute waits for a collective at once.

    Args:
        program: placed; may be lowered already, with its mesh dimensions' names for groups.
        operation_time: seconds of an operation on the compute stream.
    """
    wiring = links(program.mesh, device) if program.mesh is not None else {}
    alone = program.mesh is None or program.mesh.world_size == 1
    crowding = 1.0 if alone else device.crowding
    line = StepTimeline()
    compute = 0.0
    communication = {True: 0.0, False: 0.0}  # between nodes, inside one
    done: dict[fx.Node, float] = {}  # what is still in flight where a value is read
    for node in program.operations():
        phase = node.meta["phase"]
        before = compute
        reads_now = not runs_no_kernel(node) or is_collective(node)
        pending = max((done.get(source, 0.0) for source in node.all_input_nodes), default=0.0)
        if reads_now and pending > compute:
            line.exposed_seconds += pending - compute
            compute = pending
        elif pending and (node.target is torch_internals.WAIT or is_view(node)):
            done[node] = pending
        if is_collective(node):
            kind, size, mesh_dim = collective_of(node)
            wires = wiring[mesh_dim].crosses
            start = max(compute, communication[wires])
            took = float(collective_seconds(kind, size, wiring[mesh_dim]))
            communication[wires] = done[node] = start + took
            line.communication_seconds += took
            line.events.append(Event(node, COMMUNICATION, start, took))
            if not device.overlaps:
                line.exposed_seconds += done[node] - compute
                compute = done[node]
        else:
            took = operation_time(node, device) * crowding
            line.compute_seconds += took
            line.flops += node_flops(node) if reads_now else 0.0
            if took:
                line.events.append(Event(node, COMPUTE, compute, took))
            compute += took
        line.seconds_by_phase[phase] += compute - before
    end = max(
        [compute, *(done.get(node, 0.0) for node in program.results), *communication.values()]
    )
    if end > compute:  # the step is over when its last collective is
        line.exposed_seconds += end - compute
        last = next((e.node.meta["phase"] for e in reversed(line.events)), PHASES[0])
        line.seconds_by_phase[last] += end - compute
    line.seconds = end
    return line
