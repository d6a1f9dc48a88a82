"""Finds repeated blocks in a forward graph, from its operations alone.

The forward is read as a text whose letters are (operator, shape, dtype); repeated layers are a
stretch that equals itself shifted by one period. Periods are tried among the distances at which
letters recur; the one that covers most of the text wins, the smallest on a tie. Within the freedom
that a repetition leaves (it may begin anywhere in its period), blocks are split where the fewest bytes
cross: at the residual stream. Each reads what the one before it made: the projections of queries, keys and
values look alike, too, but stand side by side.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from stepgraph.cost.work import size_in_bytes
from stepgraph.program.build import kind_of
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program, tensors_of
from stepgraph.torch_internals.code import inputs_of

_CANDIDATES = 48  # periods tried per stretch: bounds the work by a constant times the graph
_SHORTEST = 4  # operations in a block


@dataclass(frozen=True)
class Block:
    """Operations ``start`` to ``stop`` (exclusive) of the forward, in graph order."""

    start: int
    stop: int


def find_blocks(program: Program) -> list[Block]:
    """All repeated blocks of the forward, in order; empty where nothing repeats."""
    nodes = list(program.operations(FORWARD))
    letters = [letter(node) for node in nodes]
    crossing = crossing_bytes(nodes)
    blocks: list[Block] = []
    for edges in repetitions(letters, crossing):
        found = [Block(start, stop) for start, stop in itertools.pairwise(edges)]
        if _chained(found, nodes):
            blocks += found
    return sorted(blocks, key=lambda block: block.start)


def repetitions(letters: list, crossing: Sequence[int]) -> Iterator[list[int]]:
    """Where each repetition in a text has its edges, set where the least crosses.

    Args:
        letters: what is compared.
        crossing: what crosses from the letter before each to it.
    """
    for start, period, covered in stretches(letters):
        yield min(
            possible_edges(start, period, covered),
            key=lambda edges: sum(crossing[edge] for edge in edges),
        )


def stretches(letters: list) -> Iterator[tuple[int, int, int]]:
    """Where a text repeats itself: from which letter on, with which period, for how many letters."""
    numbers: dict[Hashable, int] = {}
    text = np.array([numbers.setdefault(one, len(numbers)) for one in letters], dtype=np.int64)
    left = [(0, len(letters))]
    while left:
        low, high = left.pop()
        found = _longest_repetition(text, low, high)
        if found is not None:
            start, _, covered = found
            left += [(low, start), (start + covered, high)]
            yield found


def possible_edges(start: int, period: int, covered: int) -> Iterator[list[int]]:
    """Where the periods of a stretch may begin and end: it is some letters longer than they are."""
    count, slack = divmod(covered, period)
    for first in range(start, start + slack + 1):
        yield [first + k * period for k in range(count + 1)]


def _chained(blocks: list[Block], nodes: list[fx.Node]) -> bool:
    for one, other in itertools.pairwise(blocks):
        made = set(nodes[one.start : one.stop])
        reads = (inputs_of(node) for node in nodes[other.start : other.stop])
        if made.isdisjoint(itertools.chain.from_iterable(reads)):
            return False
    return True


def letter(node: fx.Node) -> tuple:
    """What an operation is to a reader of the text: operator, shapes and types."""
    kinds = map(kind_of, tensors_of(meta(node)["val"]))
    return id(node.target), tuple((shape, dtype) for shape, _, dtype, _ in kinds)


def _longest_repetition(text: np.ndarray, low: int, high: int) -> tuple[int, int, int] | None:
    """(start, period, operations covered) of the repetition that covers most of a stretch."""
    if high - low < 2 * _SHORTEST:
        return None
    gaps: Counter[int] = Counter()
    last: dict[int, int] = {}
    for i, one in enumerate(text[low:high].tolist(), low):
        if one in last:
            gaps[i - last[one]] += 1
        last[one] = i
    # The distance between layers shows up for letters that occur once per layer; weigh it by length.
    candidates = sorted(gaps, key=lambda gap: -gap * gaps[gap])[:_CANDIDATES]
    best: tuple[int, int, int] | None = None
    for period in sorted(candidates):
        if period < _SHORTEST:
            continue
        same = np.zeros(high - low - period + 2, dtype=np.int8)
        same[1:-1] = text[low : high - period] == text[low + period : high]
        starts, stops = np.flatnonzero(np.diff(same)).reshape(-1, 2).T
        if not len(starts):
            continue
        longest = int((stops - starts).argmax())  # the first of them
        run = int(stops[longest] - starts[longest])
        if run >= period and (best is None or run + period > best[2]):
            best = (low + int(starts[longest]), period, run + period)
    if best is None or best[2] * 10 < high - low:
        return None
    return best


def crossing_bytes(nodes: list[fx.Node]) -> list[int]:
    """Bytes of forward values alive between operation i - 1 and operation i."""
    position = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node, i in position.items():
        readers = [position[user] for user in node.users if user in position]
        if readers:
            size = size_in_bytes(meta(node)["val"])
            change[i + 1] += size
            change[max(readers) + 1] -= size
    return list(itertools.accumulate(change))
