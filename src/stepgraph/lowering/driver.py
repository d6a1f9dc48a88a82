"""Calls the pieces of a Program one after the other: a function that is written for it.

It holds a value no longer than it is needed: what a call reads last is in that call's list alone, which the
body empties.
"""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.lowering.bodies import Call, Given, Number, Pieces
from stepgraph.lowering.handed_on import floats, layout, memory, root_of
from stepgraph.program.metadata import meta
from stepgraph.program.program import runnable
from stepgraph.torch_internals.storages import assert_layout, reinterpret

Compiled = Callable[[list], Sequence[Any]]


def drive(pieces: Pieces, bodies: Sequence[Compiled]) -> Callable[[Sequence], Sequence[Any]]:
    """Makes a callable from the Program's inputs to its results.

    Args:
        bodies: each compiled: a function that takes the list of what it is given, and empties it.
    """
    writer = _Writer(pieces)
    text = writer.text()
    names = {**writer.constants, **{f"body_{i}": body for i, body in enumerate(bodies)}}
    exec(compile(text, "<the pieces of a program>", "exec"), names)  # noqa: S102
    return names["run"]


class _Writer:
    """Writes the function; ``constants`` are what it names besides bodies."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.names: dict[fx.Node, str] = {}
        self.attributes: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.checks: dict[fx.Node, str] = {}  # lines: it is laid out as its views take it to be

    def text(self) -> str:
        """The function."""
        calls, program = self.pieces.calls, self.pieces.program
        number = {id(body): i for i, body in enumerate(self.pieces.bodies)}
        done: list[list[fx.Node]] = [[] for _ in [*calls, None]]
        for node, last in self.pieces.needed.items():
            done[last] += [node] if node.op != "get_attr" else []
        lines = [
            "def run(given):",
            f"  [{''.join(self.name(node) + ', ' for node in program.placeholders)}] = given",
        ]
        checked: set[fx.Node] = set()
        for call, over in zip(calls, done, strict=False):
            values = ", ".join(self.values(call))
            made = ["_" if node is None else self.name(node) for node in call.made]
            left = f"[{', '.join(made)}] = " if made else ""
            passed_on = {node for node in call.given if node in over}
            lines += [
                *(check for held, check in self.checks.items() if held not in checked),
                f"  values = [{values}]",
                *self.forget(self.name(node) for node in over if node in passed_on),
                f"  {left}body_{number[id(call.body)]}(values)",
                *self.forget(
                    [self.name(n) for n in over if n not in passed_on] + ["_"] * ("_" in made)
                ),
            ]
            checked |= {*self.checks}
        lines.append(f"  return [{', '.join(map(self.shown, program.results))}]")
        return "\n".join(lines)

    def values(self, call: Call) -> list[str]:
        """What a call is given."""
        examples = call.body.graph.find_nodes(op="placeholder")
        pairs = zip(call.given, examples, strict=True)
        return [self.value(given, meta(example)["val"]) for given, example in pairs]

    def value(self, given: Given, like: torch.Tensor) -> str:
        """One of them; ``like``: an example of it."""
        if not isinstance(given, Number):
            return self.shown(given)
        name = f"number_{given.value % 2**64}_{given.dims}"
        if name not in self.constants:
            filled = torch.full(list(like.shape), given.value, dtype=like.dtype, device=like.device)
            self.constants[name] = filled
        return name

    def shown(self, argument: Any) -> str:
        """A value of the Program: what holds it, or the view of that."""
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(self.shown, argument))}]"
        if not isinstance(argument, fx.Node):
            return self.constant(f"literal_{len(self.constants)}", argument)
        if floats(argument):
            return self.view(argument)
        node = memory(argument, self.pieces.piece_of)
        if node.op != "get_attr":
            return self.name(node)
        value = operator.attrgetter(str(node.target))(self.pieces.program.module)
        name = self.attributes.setdefault(str(node.target), f"constant_{len(self.attributes)}")
        return self.constant(name, value)

    def view(self, node: fx.Node) -> str:
        """A view of what another node holds: one call, whatever operators lead to it."""
        source = root_of(node)
        held = memory(source, self.pieces.piece_of)
        found = layout(node, source, meta(held)["val"]) if "val" in meta(held) else None
        if found is not None:
            shown, like = self.shown(source), meta(held)["val"]
            laid_out = f"{shown}, {tuple(like.shape)}, {like.stride()}"
            self.checks[held] = f"  {self.constant('assert_layout', assert_layout)}({laid_out})"
            sizes, strides, offset = found
            operation = self.constant("reinterpret", reinterpret)
            return f"{operation}({shown}, {sizes}, {strides}, {offset})"
        target = runnable(node.target)
        operation = self.constant(re.sub(r"\W", "_", f"view_{target}"), target)
        named = [f"{key}={self.shown(value)}" for key, value in node.kwargs.items()]
        return f"{operation}({', '.join([*map(self.shown, node.args), *named])})"

    def name(self, node: fx.Node) -> str:
        """The name of what holds a value."""
        return self.names.setdefault(node, f"v{len(self.names)}")

    def constant(self, name: str, value: Any) -> str:
        """The name of what is not computed; a number or nothing is written out."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        self.constants[name] = value
        return name

    def forget(self, names: Iterable[str]) -> list[str]:
        """The line after which some values are not held any more."""
        names = [*names]
        return [f"  {' = '.join(names)} = None"] if names else []
