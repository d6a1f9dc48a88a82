"""A Program as the largest stretches of its order that can be captured, and what runs between them.

What is handed on are tensors that were allocated: a view is taken anew by each stretch that reads it, so
that no compiler is given one memory twice.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from stepgraph.operators.views import is_view
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import WAITS, is_copy, waits_for
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import Program, is_write
from stepgraph.torch_internals.code import graph_module


@dataclass
class Stretch:
    """Operations in a row: a Program without roles, and which nodes it is given and makes."""

    program: Program
    given: list[fx.Node]
    made: list[fx.Node]
    captured: bool


def stretches(program: Program, refused: Mapping[fx.Node, Any]) -> list[Stretch]:
    """A Program in stretches.

    Args:
        program: as it is executed.
        refused: operations that cannot be captured. A collective, or a copy, that starts in one stretch and
            is awaited in another is not captured either, nor is its wait.
    """
    apart = set(refused)
    while True:
        groups = _groups(program, apart)
        number = {node: i for i, (_, nodes) in enumerate(groups) for node in nodes}
        split = {
            one
            for node in number
            if is_collective(node) or is_copy(node)
            for user in waits_for(node)
            if number[user] != number[node]
            for one in (node, user)
        }
        if split <= apart:
            break
        apart |= split
    drafts = [_Draft(program, nodes, captured) for captured, nodes in groups]
    wanted = {node for draft in drafts for node in draft.given}
    wanted |= {node for node in program.results if isinstance(node, fx.Node)}
    return [draft.finish(wanted) for draft in drafts]


def _groups(program: Program, apart: set[fx.Node]) -> list[tuple[bool, list[fx.Node]]]:
    """Operations in a row that are captured, or not; one of several results is with what computes it."""
    groups: list[tuple[bool, list[fx.Node]]] = []
    holder: dict[fx.Node, list[fx.Node]] = {}
    for node in program.operations():
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in holder:
            nodes = holder[source]
        else:
            captured = node not in apart
            # A view is no reason to begin another stretch: whoever reads it takes it anew.
            if not groups or (groups[-1][0] != captured and not _is_taken_anew(node)):
                groups.append((captured, []))
            nodes = groups[-1][1]
        holder[node] = nodes
        nodes.append(node)
    return groups


def _is_taken_anew(node: fx.Node) -> bool:
    """Whether a node is a view that each stretch takes of what it is given."""
    computed = node.target in WAITS or node.target is operator.getitem
    return not computed and is_view(node)


class _Draft:
    """The graph of a stretch while it is made."""

    def __init__(self, program: Program, nodes: list[fx.Node], captured: bool) -> None:
        self.program, self.nodes, self.captured = program, nodes, captured
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.given: list[fx.Node] = []
        self.start = self.graph.call_function(len, ((),))  # inputs go before it
        self.inside = set(nodes)
        for node in nodes:
            if node not in self.new:
                self.compute(node)

    def get(self, node: fx.Node) -> fx.Node:
        """A value of the Program, within this stretch."""
        if node in self.new:
            return self.new[node]
        if is_write(node) and node not in self.inside and isinstance(node.args[0], fx.Node):
            return self.get(node.args[0])  # what was written is where it was written
        if node.op == "get_attr" or _is_taken_anew(node):
            return self.compute(node)
        with self.graph.inserting_before(self.start):
            taken = self.new[node] = self.graph.placeholder(f"given_{len(self.given)}")
        set_meta(taken, {"val": meta(node)["val"], "name": meta(node).get("name", node.name)})
        self.given.append(node)
        return taken

    def compute(self, node: fx.Node) -> fx.Node:
        """One operation, and what it reads."""
        arguments = map_arg((node.args, node.kwargs), self.get)
        copy = self.graph.node_copy(node)
        copy.args, copy.kwargs = arguments  # type: ignore[assignment]
        set_meta(copy, meta(node))
        self.new[node] = copy
        return copy

    def finish(self, wanted: set[fx.Node]) -> Stretch:
        """Hands on what others want of it."""
        made = [node for node in self.nodes if node in wanted]
        self.graph.erase_node(self.start)
        self.graph.output(tuple(self.new[node] for node in made))
        module = graph_module(self.program.module, self.graph)
        part = Program(self.program.name, module, [], [], [], [], self.program.mesh)
        captured = self.captured and any(not _is_taken_anew(node) for node in self.nodes)
        return Stretch(part, self.given, made, captured)
