"""The time of one Program: streams of compute, communication and copies, walked in graph order.

Each mesh dimension has a communicator, a stream of its own; those that go over the same wires, inside nodes
or between them, share these.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from stepgraph.cost.collectives import collective_of, collective_seconds, links
from stepgraph.cost.device import Device
from stepgraph.cost.work import operation_seconds, remembered, runs_no_kernel, size_in_bytes
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import COPY_WAITS, TO_HOST_INTO, is_copy
from stepgraph.program.metadata import meta
from stepgraph.program.program import PHASES, Program
from stepgraph.torch_internals.code import inputs_of

COMPUTE, COMMUNICATION, COPIES = "compute", "communication", "copies"


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

    ``seconds`` is the whole; ``exposed_seconds`` the part in which compute stood still for a collective, or
    a copy to the host or back.
    ``seconds_by_phase`` is the compute stream's time, waiting included, by phase: it adds up to the whole.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flops: float = 0.0
    events: list[Event] = field(default_factory=list)


@dataclass
class Flight:
    """One collective: ``left`` of its seconds are still to come, were it alone on its wires."""

    node: fx.Node
    left: float
    start: float = -1.0
    end: float = -1.0


class Wires:
    """When collectives begin and end.

    A communicator runs one collective after the other. Communicators of several mesh dimensions run beside
    each other, and where they go over the same wires, each has an equal share of them.

    Args:
        wires: mesh dimension -> what names its wires.
    """

    def __init__(self, wires: Mapping[str, Hashable]) -> None:
        self._wires = wires
        self._queues: dict[str, deque[Flight]] = {mesh_dim: deque() for mesh_dim in wires}
        self._now = 0.0
        self.flights: list[Flight] = []

    def start(self, node: fx.Node, mesh_dim: str, seconds: float, at: float) -> Flight:
        """A collective is queued at a time; times never go back."""
        self.advance(at)
        flight = Flight(node, seconds)
        self.flights.append(flight)
        self._queues[mesh_dim].append(flight)
        return flight

    def end_of(self, flight: Flight) -> float:
        """When it is done if nothing else is queued until then."""
        while flight.end < 0:
            self._step(float("inf"))
        return flight.end

    def end(self) -> float:
        """When all is done."""
        return max((self.end_of(flight) for flight in self.flights), default=0.0)

    def advance(self, until: float) -> None:
        """Lets time pass."""
        while self._now < until and self._step(until):
            pass
        self._now = max(self._now, until)

    def _step(self, until: float) -> bool:
        """To the end of the next collective, or until then; false where nothing is in flight."""
        heads = {mesh_dim: queue[0] for mesh_dim, queue in self._queues.items() if queue}
        if not heads:
            return False
        sharing: dict[Hashable, int] = {}
        for mesh_dim, head in heads.items():
            head.start = self._now if head.start < 0 else head.start
            wires = self._wires[mesh_dim]
            sharing[wires] = sharing.get(wires, 0) + 1
        needs = {dim: head.left * sharing[self._wires[dim]] for dim, head in heads.items()}
        first = min(needs, key=lambda dim: needs[dim])
        passed = min(needs[first], until - self._now)
        self._now += passed
        for mesh_dim, head in heads.items():
            head.left -= passed / sharing[self._wires[mesh_dim]]
        if passed == needs[first]:
            heads[first].end = self._now
            self._queues[first].popleft()
        return True


def simulate(
    program: Program,
    device: Device,
    operation_time: Callable[[fx.Node, Device], float] = operation_seconds,
) -> StepTimeline:
    """Walks a placed Program in graph order.

    A collective is queued when compute has reached it. Compute stops at the first reader of its result
    until it is done: waits are delayed to their readers when the Program is lowered. Where the device does
    not overlap, compute waits for a collective at once. For a copy to the host or back compute stops where
    that is awaited; where the device is the host, a copy is an operation like any other.

    Args:
        program: placed; may be lowered already, with its mesh dimensions' names for groups.
        operation_time: seconds of an operation on the compute stream, by what it does, not by where.
    """
    wiring = links(program.mesh, device) if program.mesh is not None else {}
    alone = program.mesh is None or program.mesh.world_size == 1
    crowding = 1.0 if alone else device.crowding
    work = remembered(device, operation_time)
    line = StepTimeline()
    compute = 0.0
    # Copies to the host and back are a queue of their own, over wires that nothing else goes over.
    wires = Wires(
        {mesh_dim: group.crosses for mesh_dim, group in wiring.items()} | {COPIES: COPIES}
    )
    pending: dict[fx.Node, list[Flight]] = {}  # what may be in flight where a value is read
    for node in program.operations():
        phase = meta(node)["phase"]
        before = compute
        if read := [flight for source in inputs_of(node) for flight in pending.get(source, ())]:
            if not runs_no_kernel(node) or is_collective(node) or node.target in COPY_WAITS:
                compute = max(compute, *map(wires.end_of, read))
            else:  # a wait, or a view: who reads it waits
                pending[node] = read
        line.exposed_seconds += compute - before
        if is_collective(node):
            kind, size, mesh_dim = collective_of(node)
            took = float(collective_seconds(kind, size, wiring[mesh_dim]))
            flight = wires.start(node, mesh_dim, took, compute)
            pending[node] = [flight]
            line.communication_seconds += took
            if not device.overlaps:
                line.exposed_seconds += wires.end_of(flight) - compute
                compute = flight.end
        elif is_copy(node) and device.host is not None:
            size = size_in_bytes(meta(node.all_input_nodes[-1])["val"])
            took = device.host.latency + size / device.host.bandwidth
            awaited = node.args[0] if node.target is TO_HOST_INTO else node
            pending[awaited] = [wires.start(node, COPIES, took, compute)]  # type: ignore[index]
        else:
            seconds, flops = work(node)
            took = seconds * crowding
            line.compute_seconds += took
            line.flops += flops
            if took:
                line.events.append(Event(node, COMPUTE, compute, took))
            compute += took
        line.seconds_by_phase[phase] += compute - before
    end = max(compute, wires.end())
    line.events += [
        Event(f.node, COPIES if is_copy(f.node) else COMMUNICATION, f.start, f.end - f.start)
        for f in wires.flights
    ]
    line.events.sort(key=lambda event: event.start)
    if end > compute:  # the step is over when its last collective, or copy, is
        line.exposed_seconds += end - compute
        last = meta(max(wires.flights, key=lambda flight: flight.end).node)["phase"]
        line.seconds_by_phase[last] += end - compute
    line.seconds = end
    return line
