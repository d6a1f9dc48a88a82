"""Finds what repeats in a Program as it is executed: stretches of its order that look alike.

Operations of layers are read in order, each as a letter (what it computes, on which shapes). A stretch
that equals itself shifted by a period is repeated layers: their forward, their backward. What stands beside
the layers is no letter: where it is the same in every layer it is part of them, where it is not they are
divided there, all of them.
"""

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.blocks import possible_edges, stretches
from stepgraph.lowering.attention import KEYED
from stepgraph.lowering.beside import find_beside, is_a_call
from stepgraph.lowering.handed_on import root_of, roots_of
from stepgraph.operators.views import is_view
from stepgraph.program.build import kind_of
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensors_of
from stepgraph.program.randomness import RANDOM

# Arguments that tell operations, and ranks, apart: a letter is without them.
VARYING: dict[Any, tuple[int, ...]] = {RANDOM: (2, 5), KEYED: (9,)}

# A body of a few operations costs more to call than to run: short periods are taken several at once.
SHORTEST = 32
_TIMES = 4  # but a body serves so many at least, where there are so many


@dataclass(frozen=True)
class Piece:
    """Operations ``start`` to ``stop`` (exclusive), in order.

    ``repeats``: another piece may look like it; ``plain``: there is nothing in it to compile.
    """

    start: int
    stop: int
    repeats: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Layers:
    """Repeated layers: before which letters each begins (the last number: where the last one ends).

    ``splits``: how many letters behind its beginning each is divided.
    """

    edges: Sequence[int]
    splits: Sequence[int] = ()

    def boundaries(self) -> list[int]:
        """All places where a piece ends, in order."""
        inside = [edge + split for edge in self.edges[:-1] for split in self.splits]
        return sorted((*self.edges, *inside))

    def behind(self, place: int) -> "Layers":
        """The same of a text that begins so many letters earlier."""
        return replace(self, edges=[edge + place for edge in self.edges])


@dataclass
class Text:
    """A Program to be read.

    Attributes:
        operations: all that are no views, in order; ``letters``: of what is alike the same number.
        inside: where among them those of layers are.
        clusters: of what stands before each of these, and behind the last, a number; 0: of nothing.
        layers: in order.
    """

    operations: list[fx.Node]
    letters: list[int]
    inside: list[int]
    clusters: list[int]
    layers: list[Layers]

    def between(self, place: int) -> range:
        """Where among the operations stands what is before the ``place``-th of the layers."""
        start = self.inside[place - 1] + 1 if place else 0
        last = place == len(self.inside)
        return range(start, len(self.operations) if last else self.inside[place])


class Reader:
    """Reads a Program as it is executed; once more where the order of its operations has changed."""

    def __init__(self, program: Program) -> None:
        root = roots_of(program)
        operations = [node for node in program.operations() if root[node] is node]
        self.program, self.beside = program, find_beside(program, operations, root)
        numbers: dict[tuple, int] = {}
        self.letter = {n: numbers.setdefault(_letter(n), len(numbers)) for n in operations}

    def text(self) -> Text:
        """Its operations in their present order, and the layers among them."""
        operations = [node for node in self.program.operations() if node in self.letter]
        letters = [self.letter[node] for node in operations]
        inside = [i for i, node in enumerate(operations) if node not in self.beside]
        words: dict[tuple, int] = {(): 0}
        clusters = [
            words.setdefault(tuple(letters[start + 1 : stop]), len(words))
            for start, stop in pairwise([-1, *inside, len(operations)])
        ]
        crossing = _crossings([operations[i] for i in inside])
        of_rows = _of_rows([operations[i] for i in inside])
        found = [*of_rows]
        ends = [
            0,
            *(edges for rows in of_rows for edges in (rows.edges[0], rows.edges[-1])),
            len(inside),
        ]
        for low, high in zip(ends[::2], ends[1::2], strict=True):
            read = [letters[i] for i in inside[low:high]]
            within = _layers(read, crossing[low : high + 1], clusters[low : high + 1])
            found += (layers.behind(low) for layers in within)
        found.sort(key=lambda layers: layers.edges[0])
        return Text(operations, letters, inside, clusters, found)


def _of_rows(operations: list[fx.Node]) -> list[Layers]:
    """What is computed some rows at a time: layers however few they are, or their rows would meet again."""
    regions: list[list[tuple[int, int]]] = []
    for place, node in enumerate(operations):
        number = meta(node).get("rows_piece")
        if number is None:
            continue
        if not regions or number < regions[-1][-1][1]:  # another region begins
            regions.append([])
        regions[-1].append((place, number))
    found = []
    for region in regions:
        first = {number: place for place, number in reversed(region)}
        found.append(Layers([*sorted(first.values()), region[-1][0] + 1]))
    return found


def find_pieces(text: Text) -> list[Piece]:
    """All operations, in pieces; one that does not repeat lies between two that do.

    What stands beside the layers is a piece, or several, wherever a layer begins, ends or is divided.
    """
    boundaries = [layers.boundaries() for layers in text.layers]
    repeated = {pair for edges in boundaries for pair in pairwise(edges)}
    places = sorted({0, len(text.inside)}.union(*boundaries))
    pieces = _beside(text, text.between(0))
    for start, stop in pairwise(places):
        first, last = text.inside[start], text.inside[stop - 1]
        pieces.append(Piece(first, last + 1, (start, stop) in repeated))
        pieces += _beside(text, text.between(stop))
    return pieces


def _beside(text: Text, places: range) -> list[Piece]:
    """What stands between layers: calls that are made as they are, and what is worth compiling."""
    pieces: list[Piece] = []
    compiled: set[fx.Node] = set()  # by the last of them
    for place in places:
        node = text.operations[place]
        plain = _is_plain(node, compiled)
        if not pieces or pieces[-1].plain is not plain:
            pieces.append(Piece(place, place, plain=plain))
            compiled = set()
        pieces[-1] = replace(pieces[-1], stop=place + 1)
        compiled |= set() if plain else {node}
    return [part for piece in pieces for part in ([piece] if piece.plain else _parts(text, piece))]


def _is_plain(node: fx.Node, compiled: set[fx.Node]) -> bool:
    if node.target in (operator.getitem, torch_internals.mutable_copy):  # goes with what it takes
        return root_of(node.all_input_nodes[-1]) not in compiled
    return is_a_call(node)


def _parts(text: Text, piece: Piece) -> list[Piece]:
    """What repeats in a piece, as pieces: the updates of layer after layer."""
    letters = text.letters[piece.start : piece.stop]
    nothing = [0] * (len(letters) + 1)
    boundaries = [layers.boundaries() for layers in _layers(letters, nothing, nothing)]
    places = sorted({0, len(letters)}.union(*boundaries))
    return [Piece(piece.start + a, piece.start + b, bool(boundaries)) for a, b in pairwise(places)]


def _layers(letters: list[int], crossing: list[int], clusters: list[int]) -> Iterator[Layers]:
    """Repeated layers: divided in as few places as can be, then where least is handed on."""
    filled = [place for place, cluster in enumerate(clusters) if cluster]
    for start, period, covered in stretches(letters):
        period *= _several(period, covered // period)
        found = (
            Layers(edges, _irregular(edges, clusters, filled))
            for edges in possible_edges(start, period, covered)
        )
        best = min(
            found, key=lambda one: (len(one.splits), sum(crossing[edge] for edge in one.edges))
        )
        if period >= 2 * SHORTEST:
            low, high = best.edges[:2]
            within = _layers(letters[low:high], crossing[low : high + 1], clusters[low : high + 1])
            splits = {place for one in within for place in one.boundaries()} - {0, period}
            if splits and min(b - a for a, b in pairwise(sorted({0, *splits, period}))) >= SHORTEST:
                best = replace(best, splits=sorted(splits.union(best.splits)))
        yield best


def _irregular(edges: Sequence[int], clusters: list[int], filled: list[int]) -> list[int]:
    """How many letters behind the beginning of a layer not the same stands in all of them."""
    period = edges[1] - edges[0]
    of_layers = filled[bisect_left(filled, edges[0]) : bisect_left(filled, edges[-1])]
    places = {(place - edges[0]) % period for place in of_layers} - {0}
    return sorted(p for p in places if len({clusters[edge + p] for edge in edges[:-1]}) > 1)


def _several(period: int, layers: int) -> int:
    """How many layers a body computes: as many for all of them."""
    wanted = max(1, min(-(-SHORTEST // period), layers // _TIMES))
    return next(times for times in range(wanted, 0, -1) if layers % times == 0)


def _letter(node: fx.Node) -> tuple:
    """What an operation computes: its arguments but for values, and what results are like."""
    at = VARYING.get(node.target, ())
    args = tuple(None if i in at else _constant(arg) for i, arg in enumerate(node.args))
    kwargs = tuple((key, _constant(value)) for key, value in node.kwargs.items())
    return id(node.target), args, kwargs, tuple(map(kind_of, tensors_of(meta(node).get("val"))))


def _constant(argument: Any) -> Any:
    kind = type(argument)
    if argument is None or kind is fx.Node:
        return None
    if kind is int or kind is bool or kind is str:
        return kind, argument  # the kind, because 1 == True
    if isinstance(argument, (tuple, list)):
        return tuple(map(_constant, argument))
    return repr(argument)


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
