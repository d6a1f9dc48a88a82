"""Finds what repeats in a Program as it is executed: stretches of its order that look alike.

Operations are read in order, each as a letter (what it computes, on which shapes). A stretch that equals
itself shifted by a period is repeated layers: their forward, their backward, their updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from stepgraph.analysis.blocks import repetitions
from stepgraph.operators.views import is_view
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensors_of

# A body of a few operations costs more to call than to run: short periods are taken several at once.
SHORTEST = 48
_TIMES = 4  # but a body serves so many at least, where there are so many


@dataclass(frozen=True)
class Piece:
    """Operations ``start`` to ``stop`` (exclusive), in order; ``repeats``: another piece looks like it."""

    start: int
    stop: int
    repeats: bool


def find_pieces(operations: list[fx.Node], varying: dict[Any, tuple[int, ...]]) -> list[Piece]:
    """All operations, in pieces.

    Args:
        varying: targets whose arguments at some positions tell operations apart, and are not looked at.

    Returns:
        in order; one that does not repeat lies between two that do.
    """
    numbers: dict[tuple, int] = {}
    letters = [numbers.setdefault(_letter(n, varying), len(numbers)) for n in operations]
    crossing = _crossings(operations)
    pieces, done = [], 0
    for start, stop in sorted(_repeated(letters, crossing)):
        pieces += [Piece(done, start, False)] * (done < start) + [Piece(start, stop, True)]
        done = stop
    return pieces + [Piece(done, len(letters), False)] * (done < len(letters))


def _repeated(letters: list[int], crossing: list[int]) -> Iterator[tuple[int, int]]:
    """Where what repeats starts and stops: of several layers that repeat together, each of them."""
    for edges in repetitions(letters, crossing, _several):
        first, second = edges[:2]
        within = [(0, second - first)]
        if second - first >= 2 * SHORTEST:
            found = [*_repeated(letters[first:second], crossing[first : second + 1])]
            within = [(start, stop) for start, stop in found if stop - start >= SHORTEST] or within
        for edge in edges[:-1]:
            yield from ((edge + start, edge + stop) for start, stop in within)


def _several(period: int, covered: int) -> int:
    return period * max(1, min(-(-SHORTEST // period), covered // period // _TIMES))


def _letter(node: fx.Node, varying: dict[Any, tuple[int, ...]]) -> tuple:
    at = varying.get(node.target, ())
    args = [None if i in at else _constant(arg) for i, arg in enumerate(node.args)]
    kwargs = [(key, _constant(value)) for key, value in node.kwargs.items()]
    values = tensors_of(meta(node).get("val"))
    shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in values)
    return (str(node.target), repr(args), repr(kwargs), shapes)


def _constant(argument: Any) -> Any:
    return map_arg(argument, lambda _: None)


def _crossings(operations: list[fx.Node]) -> list[int]:
    """How many values are handed on between operation i - 1 and operation i; one on its way weighs much."""
    position = {node: i for i, node in enumerate(operations)}
    change = [0] * (len(operations) + 2)
    for node, i in position.items():
        readers = [position[user] for user in node.users if user in position]
        if readers and not is_view(node):
            weight = 1000 if is_collective(node) else 1
            change[i + 1] += weight
            change[max(readers) + 1] -= weight
    total, found = 0, []
    for step in change:
        total += step
        found.append(total)
    return found
