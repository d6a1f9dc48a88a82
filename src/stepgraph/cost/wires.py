"""Collectives in flight: a queue for each mesh dimension, and wires that the queues share."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import fx


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
