"""Functions of single scores and positions, as text: what a Program can hold, compare and print.

One is a line of Python: ``def f(score, b, h, q, k, t0): v0 = look(t0, [h]); v1 = aten.mul.Tensor(...)``.
``b``, ``h``, ``q`` and ``k`` count rows of the batch, heads, queries and keys; ``t0``, ``t1``, ... are
tensors that the function looks into.
"""

import ast
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

aten = torch.ops.aten
Overload = type(aten.add.Tensor)

POSITIONS = ("b", "h", "q", "k")


def text_of(graph: fx.Graph, arguments: Sequence[str]) -> str | None:
    """The text of a function of ``arguments`` and tensors; None where it is not made of their values alone.

    Such a one draws, or holds a tensor that is not among its arguments, or does what no kernel could.
    """
    names: dict[fx.Node, Any] = {}
    given = graph.find_nodes(op="placeholder")
    for index, node in enumerate(given):
        extra = index - len(arguments)
        names[node] = Shown(arguments[index] if extra < 0 else f"t{extra}")
    lines = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        target = node.target
        if not isinstance(target, Overload) or target.namespace != "aten":
            return None
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return None
        args, kwargs = map_arg((list(node.args), node.kwargs), names.__getitem__)
        if target is aten.index.Tensor:
            if not all(isinstance(index, Shown) for index in args[1]):
                return None
            call = f"look({args[0]!r}, {args[1]!r})"
        else:
            shown = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
            call = f"{target}({', '.join(shown)})"
        names[node] = Shown(f"v{len(lines)}")
        lines.append(f"{names[node]!r} = {call}")
    result = graph.output_node().args[0]
    if not isinstance(result, fx.Node):
        return None
    takes = ", ".join(repr(names[node]) for node in given)
    return f"def f({takes}): {'; '.join([*lines, f'return {names[result]!r}'])}"


class Shown(str):
    """Shown as it stands."""

    __slots__ = ()
    __repr__ = str.__str__


def subscript(tensor: torch.Tensor, at: Sequence[torch.Tensor]) -> torch.Tensor:
    """How torch's kernel wants a tensor to be read."""
    return tensor[tuple(at)]


@functools.cache
def function_of(
    text: str, device: torch.device, look: Callable[..., torch.Tensor] = aten.index.Tensor
) -> Callable[..., torch.Tensor]:
    """The function of a text; what it makes, it makes on a device, whichever its text names."""
    known = {
        "aten": aten, "torch": torch, "inf": math.inf, "nan": math.nan, "look": look,
        "device": lambda **_: device,
    }  # fmt: skip
    exec(text, known)
    return known["f"]  # type: ignore[return-value]


@functools.cache
def _reads(text: str) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """What is looked up where (tensor, names of the indices), and every mention of a name."""
    tree = ast.parse(text)
    found, mentioned = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            mentioned.append(node.id)
        match node:
            case ast.Call(ast.Name("look"), [ast.Name(tensor), ast.List(at)]):
                found.append((tensor, [index.id for index in at]))  # type: ignore[attr-defined]
    return found, mentioned


@functools.cache
def looked_up_by(text: str, position: str) -> dict[str, int] | None:
    """Tensors that are read along a dimension at ``position`` alone: name -> the dimension.

    None where the position is read in another way: a part of the batch, or of the heads, counts its own
    from zero, so it would read other values.
    """
    reads, mentioned = _reads(text)
    found: dict[str, int] = {}
    for tensor in {tensor for tensor, _ in reads}:
        dims = [[i for i, x in enumerate(at) if x == position] for t, at in reads if t == tensor]
        if not any(dims):
            continue
        alike = all(one == dims[0] and len(one) == 1 for one in dims)
        if not (tensor.startswith("t") and alike and mentioned.count(tensor) == len(dims)):
            return None
        found[tensor] = dims[0][0]
    indexed = sum(at.count(position) for _, at in reads)
    return found if indexed == mentioned.count(position) else None


def is_read_once(text: str, tensor: str, dims: int) -> bool:
    """Whether a tensor is read at one place, a number at a time."""
    reads, mentioned = _reads(text)
    mine = [at for t, at in reads if t == tensor]
    return mentioned.count(tensor) == 1 and len(mine) == 1 and len(mine[0]) == dims
