"""What of a Program has a row for each of the batch before placement, and numbers that may count rows."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from stepgraph.operators.views import REARRANGES
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program, Value

aten = torch.ops.aten
_SCALING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_TAKING_NUMBERS = {aten.mul, aten.div, aten.floor_divide, aten.full}
_TAKING_PLACES = {aten.select, aten.arange, aten.full, aten.expand}
_ALIKE = (0, 1, -1, -100)  # nobody counts as many; the last is the label that a loss ignores
MAY_COUNT_ROWS = "sums are scaled by numbers, which may count rows"
GIVEN_NUMBERS = "sums are computed with numbers that code made, which may be a rank's own"


def is_batched(role: roles.Input, value: Value, rows: int | None) -> bool:
    """Whether an input is rows of the batch; ``rows``: as for :func:`find_normalisation`."""
    if not isinstance(role, roles.UserInput) or not value.shape:
        return False
    return rows is None or value.shape[0] % rows == 0


def drawn_for_rows(program: Program, drawn: fx.Node, rows: int | None = None) -> Shard | None:
    """How slices have random numbers of which there are as many as rows, each drawing its own."""
    inputs = [value for role, _, value in program.input_rows if is_batched(role, value, rows)]
    batch = {rows, *(value.shape[0] for value in inputs)}
    dims = [dim for dim, size in enumerate(meta(drawn)["val"].shape) if size in batch]
    return Shard(dims[0]) if dims else None


def surely_rows(program: Program, result: fx.Node, rows: int | None = None) -> bool:
    """Whether a result that is whole has a row for each of the batch: nothing else is as long as that.

    Not a dimension of a parameter, nor another one of the batch, nor a number that an operation was given,
    but for the shape in which one shows its argument.
    """
    shape = tuple(meta(result)["val"].shape)
    behind = {*_behind(result)} if shape else set[fx.Node]()
    read = [(role, value) for role, node, value in program.input_rows if node in behind]
    batch = {value.shape[0] for role, value in read if is_batched(role, value, rows)}
    if not shape or batch != {shape[0]}:
        return False
    others = (value.shape[is_batched(role, value, rows) :] for role, value in read)
    if any(shape[0] in sizes for sizes in others):
        return False
    given = (_numbers(node) for node in behind if node.target not in REARRANGES)
    return all(shape[0] not in numbers for numbers in given)


def _numbers(node: fx.Node) -> list[Any]:
    """All that an operation was given that is no value, and what lists of such hold."""
    given = [*node.args, *node.kwargs.values()]
    given += [one for listed in given if isinstance(listed, (list, tuple)) for one in listed]
    return [one for one in given if isinstance(one, (int, float)) and not isinstance(one, bool)]


def of_one_shape(drawn: fx.Node, before: Collection[fx.Node] = ()) -> Iterator[fx.Node]:
    """Random numbers, and what the forward makes of them in their shape: masks of them, most often.

    Args:
        before: where not to go on.
    """
    seen, values = {drawn}, [drawn]
    for value in values:  # grows
        yield value
        for user in value.users:
            made = meta(user)["val"] if meta(user).get("phase") == FORWARD else None
            same = isinstance(made, torch.Tensor) and made.shape == meta(drawn)["val"].shape
            if same and user not in seen and user not in before:
                seen.add(user)
                values.append(user)


def reached(program: Program, start: set[fx.Node]) -> set[fx.Node]:
    """Some values and all that is computed of them."""
    reached = set(start)
    for node in program.operations():
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def counts_rows(number: float, rows: int) -> bool:
    """Whether a number, or one divided by it, is a multiple of the number of rows."""
    if not number or not math.isfinite(number):
        return False
    times = max(abs(number), 1 / abs(number)) / rows
    return times > 0.5 and abs(times - round(times)) < 1e-6 * times


def may_count_rows(program: Program, result: fx.Node, rows: int) -> bool:
    """Whether a number that went into a result may be how many rows there are, or a multiple."""
    behind = _behind(result)
    return any(counts_rows(n, rows) for node in behind for n in numbers_in(program, node))


@dataclass(frozen=True)
class Given:
    """Numbers that are in a graph because Python's code had them: they may be each rank's own.

    Attributes:
        handed: some were handed over, by code between graphs or with the batch; what is made of them is any
            number.
        read: those that were read where code may have left them: attributes, globals, lengths.
    """

    handed: bool = False
    read: frozenset[float] = frozenset()


NOTHING_GIVEN = Given()


def takes_given(program: Program, result: fx.Node, given: Given) -> bool:
    """Whether a result may be computed with a number that was given."""
    if not (given.handed or given.read):
        return False
    for node in _behind(result):
        scaling = numbers_in(program, node)
        numbers = (n for n in (*_plain(node), *scaling) if n not in _ALIKE)
        if given.handed and not all(_is_square(node, n) for n in numbers):
            return True
        if any(n in given.read or 1 / n in given.read for n in scaling if n):
            return True
    return False


def _plain(node: fx.Node) -> list[float]:
    """The numbers that an operation of single elements, or one that picks or counts some, is given."""
    if torch.Tag.pointwise not in _tags(node) and _packet(node) not in _TAKING_PLACES:
        return []
    return _numbers(node)


def _is_square(node: fx.Node, number: float) -> bool:
    return number == 2 and _packet(node) is aten.pow


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _behind(result: fx.Node) -> Iterator[fx.Node]:
    """A value and all that it is computed of."""
    found, stack = {result}, [result]
    for node in stack:  # grows
        yield node
        stack += set(node.all_input_nodes) - found
        found.update(node.all_input_nodes)


def numbers_in(program: Program, node: fx.Node) -> list[float]:
    """The plain numbers of a constant, or of what fills with, multiplies or divides by them."""
    if node.op == "get_attr":
        value = getattr(program.module, str(node.target))
        return [float(value)] if value.numel() == 1 else []
    if _packet(node) in _TAKING_NUMBERS:
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
    numbers: list[float] = []
    found = {node: None}
    behind = [node]
    for one in behind:  # grows; each once, however many paths lead there
        value = meta(one).get("val")
        if one.op == "placeholder" or not isinstance(value, torch.Tensor):
            return []
        mine = list(numbers_in(program, one))
        if not one.all_input_nodes and value.dim():
            mine += map(float, (*value.shape, value.numel()))
        if not one.all_input_nodes and not mine:
            return []
        numbers += mine
        behind += [source for source in one.all_input_nodes if source not in found]
        found |= dict.fromkeys(one.all_input_nodes)
    return numbers
