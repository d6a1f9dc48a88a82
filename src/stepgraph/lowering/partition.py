"""Splits a lowered Program of forward and backward where a caller stands between the two."""

from collections.abc import Collection

import torch
from torch import fx

from stepgraph.operators.views import storage_roots
from stepgraph.program import roles
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import FORWARD, Program, Value, is_write
from stepgraph.torch_internals.code import graph_module

_OF_BACKWARD = (roles.Grad, roles.InputGrad)


def forward_and_backward(program: Program) -> tuple[Program, Program]:
    """A Program for each side; what the backward reads of the forward is saved between them.

    Args:
        program: bound and lowered; it may write into its state.

    reads: phases. writes: two Programs, with ``Saved`` results and inputs. preserves: every result,
    bitwise. Parameters and buffers are read anew by the backward; the batch and the seed, which the next
    forward replaces, are saved, and so is the old value of a buffer that the forward writes: its writes
    are the forward's own, however often a backward follows.
    """
    nodes = [node for node in program.graph.nodes if node.op in ("call_function", "get_attr")]
    late = {node for node in nodes if meta(node).get("phase", FORWARD) != FORWARD}
    root = storage_roots(program)
    written = {root[node.args[0]] for node in nodes if is_write(node) and node not in late}
    rows = program.output_rows
    gradients = {node for role, node, _ in rows if isinstance(role, _OF_BACKWARD)}
    role_of = {node: role for role, node, _ in program.input_rows}
    saved = [
        node
        for node in program.graph.nodes
        if node not in late
        and (node in gradients or any(user in late for user in node.users))
        and (node.op == "call_function" or node in written or _is_replaced(role_of.get(node)))
    ]
    kept = {
        node
        for node in saved
        if root[node] in written or isinstance(role_of.get(node), roles.SEEDS)
    }
    forward = _Side(program, [node for node in nodes if node not in late], kept)
    for node in program.placeholders:
        forward.take(node, role_of[node])
    forward.compute()
    for index, node in enumerate(saved):
        forward.give(
            roles.Saved(index), forward.copies.get(node, forward.new[node]), Value.of(node)
        )
    backward = _Side(program, [node for node in nodes if node in late or node.op == "get_attr"])
    for index, node in enumerate(saved):
        backward.take(node, roles.Saved(index))
    for node in program.placeholders:
        if node not in saved:
            backward.take(node, role_of[node])
    backward.compute()
    for role, node, value in rows:
        side = backward if isinstance(role, _OF_BACKWARD) else forward
        side.give(role, side.new[node], value)
    return forward.finish(), backward.finish()


def _is_replaced(role: roles.Input | None) -> bool:
    """Whether the next forward brings another tensor, or writes into this one."""
    return isinstance(role, (roles.UserInput, *roles.SEEDS))


class _Side:
    """One of the two Programs while it is made: ``take`` its inputs, ``compute``, ``give`` results.

    ``kept``: of what it makes, that whose storage will be written again; ``copies`` are made at once.
    """

    def __init__(
        self, program: Program, nodes: list[fx.Node], kept: Collection[fx.Node] = ()
    ) -> None:
        self.program, self.nodes, self.kept = program, nodes, kept
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[roles.Input] = []
        self.results: list[tuple[roles.Output, fx.Node, Value]] = []

    def take(self, node: fx.Node, role: roles.Input) -> None:
        """Adds an input."""
        self.new[node] = self.graph.placeholder(f"input_{len(self.inputs)}")
        set_meta(self.new[node], {**meta(node), "name": roles.label(role)})
        self.inputs.append(role)

    def compute(self) -> None:
        """Copies the operations."""
        for node in [*self.new]:
            self._copy(node)
        for node in self.nodes:
            self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
            self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        if node in self.kept:
            copy = self.graph.call_function(torch.ops.aten.clone.default, (self.new[node],))
            set_meta(copy, {**meta(node), "phase": FORWARD, "module": ""})
            self.copies[node] = copy

    def give(self, role: roles.Output, node: fx.Node, value: Value) -> None:
        """Adds a result: a node of this side."""
        self.results.append((role, node, value))

    def finish(self) -> Program:
        """The Program, without inputs and operations that it has no use for."""
        self.graph.output(tuple(node for _, node, _ in self.results))
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        side = Program(
            self.program.name,
            graph_module(self.program.module, self.graph),
            self.inputs,
            [role for role, _, _ in self.results],
            [*map(Value.of, placeholders)],
            [value for _, _, value in self.results],
            self.program.mesh,
        ).finish()
        side.keep_inputs(lambda _, node: bool(node.users))
        return side
