"""Memory of a Program over time: which storage lives when, by category.

A storage is born with the operation that allocates it and dies with the last reader of it or of any
view of it. Inputs live throughout; a ``New*`` result written over an input costs nothing beyond it.
Bytes are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from stepgraph import torch_internals
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.program import BACKWARD, FORWARD, OPTIMIZER, Program, is_write, tensors_of

CATEGORIES = (
    "parameters", "gradients", "optimizer", "inputs", "activations", "temporaries", "communication",
)  # fmt: skip


@dataclass
class MemoryTimeline:
    """Bytes alive after each operation, in graph order.

    ``at[i]`` are the bytes by category while operation ``i`` runs, its result included.
    """

    operations: list[fx.Node]
    at: list[dict[str, int]]

    def peak(self, phase: str | None = None, without: tuple[str, ...] = ()) -> int:
        """Largest number of bytes alive at once, in one phase, without some categories."""
        totals = [
            sum(size for category, size in alive.items() if category not in without)
            for node, alive in zip(self.operations, self.at, strict=True)
            if phase in (None, node.meta["phase"])
        ]
        return max(totals, default=0)

    def peak_of(self, category: str) -> int:
        """Largest number of bytes of one category alive at once."""
        return max((alive.get(category, 0) for alive in self.at), default=0)


def memory_timeline(program: Program) -> MemoryTimeline:
    """Simulates the Program in graph order; linear in its size."""
    operations = list(program.operations())
    position = {node: i for i, node in enumerate(operations)}
    root = storage_roots(program)
    last_read: dict[fx.Node, int] = {}
    for node in operations:
        for source in node.all_input_nodes:
            last_read[root[source]] = position[node]
    end = len(operations)
    written = {role: node for node, role in zip(program.placeholders, program.inputs, strict=True)}
    for node, role in zip(program.results, program.outputs, strict=True):
        target = roles.written_input(role)
        # Written in place right behind its producer: no storage of its own past that point.
        in_place = target in written
        last_read[root[node]] = max(last_read.get(root[node], 0), position.get(node, 0))
        if not in_place:
            last_read[root[node]] = end
    born: list[list[tuple[str, int]]] = [[] for _ in range(end + 1)]
    dead: list[list[tuple[str, int]]] = [[] for _ in range(end + 1)]
    alive = dict.fromkeys(CATEGORIES, 0)
    for node, role in zip(program.placeholders, program.inputs, strict=True):
        alive[_input_category(role)] += _bytes(node)
    gradients = _gradient_roots(program, root)
    for node in operations:
        if root[node] is not node or is_write(node):
            continue
        category = _category(node, gradients, position, last_read, operations)
        born[position[node]].append((category, _bytes(node)))
        dead[min(last_read.get(node, position[node]) + 1, end)].append((category, _bytes(node)))
    at = []
    for i in range(end):
        for category, size in dead[i]:
            alive[category] -= size
        for category, size in born[i]:
            alive[category] += size
        at.append(dict(alive))
    return MemoryTimeline(operations, at)


def storage_roots(program: Program) -> dict[fx.Node, fx.Node]:
    """For every node the node that allocated its storage (itself, unless it is a view)."""
    root: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        source = viewed(node)
        root[node] = root[source] if source is not None else node
    return root


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node's result shares storage with, if any."""
    if node.op != "call_function":
        return None
    if node.target is torch_internals.WAIT or node.target is torch_internals.UNSAFE_VIEW:
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args[0]  # type: ignore[return-value]  # getitem
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def _input_category(role: roles.Input) -> str:
    match role:
        case roles.Param() | roles.Buffer():
            return "parameters"
        case roles.OptimizerState() | roles.Scalar():
            return "optimizer"
        case roles.Accumulator():
            return "gradients"
    return "inputs"


def _gradient_roots(program: Program, root: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Storages that cross from the backward into the update, or leave as gradients."""
    found = {
        root[node]
        for node, role in zip(program.results, program.outputs, strict=True)
        if isinstance(role, roles.Grad)
    }
    for node in program.operations(BACKWARD):
        if any(u.op == "call_function" and u.meta["phase"] == OPTIMIZER for u in node.users):
            found.add(root[node])
    return found


def _category(node, gradients, position, last_read, operations) -> str:
    if node in gradients:
        return "gradients"
    if is_collective(node):
        return "communication"
    phase = node.meta["phase"]
    last = last_read.get(node, position[node])
    if phase == FORWARD and operations[min(last, len(operations) - 1)].meta["phase"] != FORWARD:
        return "activations"
    return "temporaries"


def _bytes(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node.meta.get("val")))
