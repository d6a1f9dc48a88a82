"""Plain numbers in a Program, any of which may be how many rows a batch has."""

from __future__ import annotations

import math

import torch
from torch import fx

from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

aten = torch.ops.aten
_SCALING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_TAKING_NUMBERS = {aten.mul, aten.div, aten.floor_divide, aten.full}
MAY_COUNT_ROWS = "sums are scaled by numbers, which may count rows"


def counts_rows(number: float, rows: int) -> bool:
    """Whether a number, or one divided by it, is a multiple of the number of rows."""
    if not number or not math.isfinite(number):
        return False
    times = max(abs(number), 1 / abs(number)) / rows
    return times > 0.5 and abs(times - round(times)) < 1e-6 * times


def may_count_rows(program: Program, result: fx.Node, rows: int) -> bool:
    """Whether a number that went into a result may be how many rows there are, or a multiple."""
    seen, stack = {result}, [result]
    for node in stack:  # grows
        if any(counts_rows(number, rows) for number in numbers_in(program, node)):
            return True
        stack += set(node.all_input_nodes) - seen
        seen.update(node.all_input_nodes)
    return False


def numbers_in(program: Program, node: fx.Node) -> list[float]:
    """The plain numbers of a constant, or of what fills with, multiplies or divides by them."""
    if node.op == "get_attr":
        value = getattr(program.module, str(node.target))
        return [float(value)] if value.numel() == 1 else []
    if getattr(node.target, "overloadpacket", None) in _TAKING_NUMBERS:
        return [a for a in node.args if isinstance(a, (int, float)) and a not in (True, False)]
    return []


def with_numbers(program: Program, node: fx.Node) -> set[fx.Node]:
    """A value and what leads to it one by one, element by element: those that plain numbers went into."""
    found, chain = set(), [node]
    for value in chain:  # grows
        if literals(program, value):
            found.add(value)
        varying = [n for n in value.all_input_nodes if not _constant(program, n)]
        pointwise = [n for n in varying if torch.Tag.pointwise in _tags(n)]
        chain += pointwise if len(varying) == 1 else []
    return found


def _tags(node: fx.Node) -> tuple:
    return tuple(getattr(node.target, "tags", ())) if node.op == "call_function" else ()


def literals(program: Program, node: fx.Node) -> tuple:
    """The numbers that an operation multiplies or divides by, be they tensors."""
    if node.target not in _SCALING:
        return ()
    numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    for argument in node.all_input_nodes:
        numbers += _constant(program, argument)
    return tuple(numbers)


def _constant(program: Program, node: fx.Node) -> list[float]:
    """The numbers that a tensor of one number is made of, where nothing else goes into it."""
    value = meta(node).get("val")
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    return _made_of(program, node) if single else []


def _made_of(program: Program, node: fx.Node) -> list[float]:
    """Numbers, and sizes of tensors, that a constant is made of; none if it is no constant."""
    value = meta(node).get("val")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor):
        return []
    if node.all_input_nodes:
        behind = [_made_of(program, source) for source in node.all_input_nodes]
        return [*sum(behind, []), *numbers_in(program, node)] if all(behind) else []
    sizes = [*value.shape, value.numel()] if value.dim() else []
    return [*numbers_in(program, node), *map(float, sizes)]
