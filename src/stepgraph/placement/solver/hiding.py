"""What runs beside what: when operations run, and which collectives other work hides."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import fx

from stepgraph.cost.work import runs_no_kernel
from stepgraph.placement.rules.redistribution import Moves
from stepgraph.placement.solver.options import Options
from stepgraph.program.program import BACKWARD, Program

# Parts of the backward after which one looks at what is still to be reduced, and what is left to hide it.
MOMENTS = (0.0, 0.4, 0.75)
# Of what runs beside other work, the part that it does not if it begins last: of two values that cost the
# same, the one that takes longer is better reduced early.
_LATE = 1e-3

Hidden = dict[str, np.ndarray | None]  # arguments of a Link


class Hiding:
    """Says of links which part of their collectives runs beside other work.

    Args:
        gradients: values of the backward that are reduced for an update.
    """

    def __init__(
        self, program: Program, moves: Moves, ways: Options, gradients: Collection[fx.Node]
    ) -> None:
        self.program, self.ways, self.gradients = program, ways, gradients
        self.overlaps = moves.device.overlaps
        across = {group.crosses for group in moves.groups.values() if group.ranks > 1}
        # Where there are wires inside nodes and between them, it is the latter that take long.
        self._slow, self._two_wires = int(True in across), len(across) > 1
        self._place, self._moments = self._places()
        self._clock: dict[fx.Node, tuple[float, float]] = {}

    def _places(self) -> tuple[dict[fx.Node, int], np.ndarray]:
        """When operations run in the backward, and its moments.

        What is recomputed runs just before it is read.
        """
        places = {node: i for i, node in enumerate(self.program.operations(BACKWARD))}
        gradients = [places[node] for node in self.gradients if node in places]
        last = max(gradients, default=0)  # nothing hides what comes before it
        moments = np.array([*(part * len(places) for part in MOMENTS), last])
        for node in reversed(list(self.program.operations())):
            if node not in places and self.ways.runs_again(node):
                readers = [places[user] for user in node.users if user in places]
                if readers:
                    places[node] = min(readers)
        return places, moments

    def later(self, nodes: Sequence[fx.Node], begins: bool) -> np.ndarray | None:
        """The part of what some operations do that comes after each of the moments; None: nothing.

        Args:
            begins: what begins at a moment, with the result of such an operation, comes after it.
        """
        places = np.array([self._place[node] for node in nodes if node in self._place])
        if not len(places):
            return None
        runs = len(nodes) + sum(self.ways.runs_again(node) for node in nodes)
        after = np.greater_equal if begins else np.greater
        return after(places[None], self._moments[:, None]).sum(axis=1) / runs

    def takes(self, least: Mapping[fx.Node, float]) -> None:
        """Takes in how many seconds operations take at least; those not named: none."""
        now = 0.0
        for node in self.program.operations():
            begin, now = now, now + least.get(node, 0.0)
            self._clock[node] = begin, now

    def of_backward(
        self, nodes: Sequence[fx.Node], last: np.ndarray, wires: np.ndarray, is_gradient: bool
    ) -> Hidden:
        """``later``, ``runs`` and ``hides`` of a link (:class:`stepgraph.placement.solver.choices.Link`).

        Args:
            nodes: the values.
            last, wires: seconds of changes, inside nodes and between them: of the last collective, of all.
        """
        if not self.overlaps or not (is_gradient or self._two_wires):
            return {}
        # Nothing but the update waits for a gradient, or for the last step that reduces it.
        runs, hides = last[self._slow] * is_gradient, wires[0] * self._two_wires
        runs = runs * (1 - _LATE * self._lateness(nodes))
        return {"later": self.later(nodes, begins=True), "runs": runs, "hides": hides}

    def _lateness(self, nodes: Sequence[fx.Node]) -> float:
        """The part of the backward that is over when the first of some values is there."""
        places = [self._place[node] for node in nodes if node in self._place]
        return min(places, default=0) / max(1, self._moments[-1])

    def of_forward(
        self, nodes: Sequence[fx.Node], last: np.ndarray, once: np.ndarray, own: Collection[fx.Node]
    ) -> Hidden:
        """The same, of sums: they are added up behind their producer, and compute goes on to their reader.

        Args:
            once: seconds of changes whose last step is made once; what is gathered at last hides nothing.
            own: operations decided with the first of the values: what they read is not changed for them.
        """
        if not self.overlaps:
            return {}
        free = len(nodes) * self._until_read(nodes[0], own)
        runs = np.minimum(np.minimum(last.sum(axis=0), once), free)
        nothing = np.zeros(len(self._moments))
        return {"later": nothing, "runs": runs, "hides": np.zeros_like(once)}

    def _until_read(self, node: fx.Node, own: Collection[fx.Node]) -> float:
        """Seconds of other work, at least, until a kernel of others reads a value."""
        stack, first = [node], np.inf
        while stack:
            for user in stack.pop().users:
                if user.op == "output" or user in own:
                    continue
                if runs_no_kernel(user):
                    stack.append(user)
                else:
                    first = min(first, self._clock[user][0])
        return max(0.0, first - self._clock[node][1])
