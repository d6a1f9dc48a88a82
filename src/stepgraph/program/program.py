"""The Program: one training step as a functional graph with typed inputs and outputs.

What nodes carry stands in :mod:`stepgraph.program.metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from stepgraph.program.layout import MeshShape, Placements
from stepgraph.program.metadata import meta
from stepgraph.program.names import BACKWARD, FORWARD, OPTIMIZER, name_operations
from stepgraph.program.roles import Grad, Input, Output
from stepgraph.program.text import program_text
from stepgraph.torch_internals.code import copy_graph, graph_module, inputs_of

PHASES = (FORWARD, BACKWARD, OPTIMIZER)


@dataclass(frozen=True)
class Value:
    """Global shape, dtype and (once placed) placements of one input or output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements | None = None

    @classmethod
    def of(cls, node: fx.Node | None) -> Value:
        """That of a node's result, not placed; that of a number where it is no tensor."""
        tensor = None if node is None else meta(node).get("val")
        if not isinstance(tensor, torch.Tensor):
            return cls((), torch.float32)
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass
class Program:
    """One function of a training step: ``step``, ``accumulate`` or ``evaluate``.

    ``inputs[i]`` describes the i-th placeholder and ``outputs[i]`` the i-th result of the graph; the
    ``*_values`` beside them hold global shapes and placements. ``mesh`` is None until placed.
    """

    name: str
    module: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    input_values: list[Value]
    output_values: list[Value]
    mesh: MeshShape | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        """The fx graph."""
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """Input nodes, aligned with ``inputs``."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        """Result nodes, aligned with ``outputs``."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def input_rows(self) -> list[tuple[Input, fx.Node, Value]]:
        """Role, node and description of each input."""
        return list(zip(self.inputs, self.placeholders, self.input_values, strict=True))

    @property
    def output_rows(self) -> list[tuple[Output, fx.Node, Value]]:
        """Role, node and description of each output."""
        return list(zip(self.outputs, self.results, self.output_values, strict=True))

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """The results that are gradients, by parameter."""
        return {role.name: node for role, node, _ in self.output_rows if isinstance(role, Grad)}

    def operations(self, phase: str | None = None) -> Iterator[fx.Node]:
        """All call nodes in order, of one phase if given."""
        for node in self.graph.nodes:
            if node.op == "call_function" and (phase is None or meta(node)["phase"] == phase):
                yield node

    def input_node(self, role: Input) -> fx.Node:
        """The placeholder of a role."""
        return self.placeholders[self.inputs.index(role)]

    def result(self, role: Output) -> fx.Node:
        """The result node of a role."""
        return self.results[self.outputs.index(role)]

    def keep_inputs(self, keeps: Callable[[Input, fx.Node], bool]) -> None:
        """Drops the inputs that are not kept: placeholders that nothing reads."""
        rows = [(role, node, value, keeps(role, node)) for role, node, value in self.input_rows]
        self.inputs = [role for role, _, _, kept in rows if kept]
        self.input_values = [value for _, _, value, kept in rows if kept]
        for _, node, _, kept in rows:
            if not kept:
                self.graph.erase_node(node)

    def set_outputs(self, rows: Iterable[tuple[Output, fx.Node, Value]]) -> None:
        """Role, node and description of each output from here on."""
        rows = list(rows)
        self.outputs = [role for role, _, _ in rows]
        self.output_values = [value for _, _, value in rows]
        self.graph.output_node().args = (tuple(node for _, node, _ in rows),)

    def note(self, text: str) -> None:
        """Adds a line to the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def copy(self) -> Program:
        """An independent copy: passes may rewrite it in place."""
        module = graph_module(self.module, copy_graph(self.graph))
        return replace(
            self,
            module=module,
            inputs=list(self.inputs),
            outputs=list(self.outputs),
            input_values=list(self.input_values),
            output_values=list(self.output_values),
            notes=list(self.notes),
        )

    def finish(self) -> Program:
        """Names new operations, drops those without effect; passes end with it."""
        name_operations(self.graph)
        self.drop_dead()
        return self

    def drop_dead(self) -> None:
        """Drops operations without effect."""
        for node in reversed(list(self.graph.nodes)):
            if node.users or node.op not in ("call_function", "get_attr"):
                continue
            if not _has_effect(node):
                self.graph.erase_node(node)

    def __str__(self) -> str:
        return program_text(self)


def is_write(node: fx.Node) -> bool:
    """Whether a node writes into an argument (only lowering makes such nodes)."""
    return (
        node.op == "call_function"
        and getattr(node.target, "_schema", None) is not None
        and (
            node.target._schema.is_mutable  # type: ignore[union-attr]
        )
    )


def _has_effect(node: fx.Node) -> bool:
    """Whether a node matters without readers: it writes, or waits for a write."""
    return is_write(node) or any(map(is_write, inputs_of(node)))


def runnable(target: Any) -> Any:
    """What executes an operation one by one: a view that copies where memory is laid out otherwise.

    Strides in ``val`` are those of torch's shape functions; kernels do not always keep to them (batch
    norm on the CPU returns a contiguous result for a transposed input, torch 2.13).
    """
    return torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes an operation reads, in argument order, repeats kept."""
    found: list[fx.Node] = []
    kwargs = node.kwargs
    _collect((*node.args, *kwargs.values()) if kwargs else node.args, found)
    return found


def _collect(arguments: Iterable[Any], found: list[fx.Node]) -> None:
    """The same of nested arguments; asked for each operation by every pass, so by exact types first."""
    for argument in arguments:
        kind = type(argument)
        if kind is fx.Node:
            found.append(argument)
        elif kind in _LEAVES:
            continue
        elif isinstance(argument, (tuple, list)):
            _collect(argument, found)
        elif isinstance(argument, dict):
            _collect(argument.values(), found)
        elif isinstance(argument, slice):
            _collect((argument.start, argument.stop, argument.step), found)


_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device}


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in a node's ``val``."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []
