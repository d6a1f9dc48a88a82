"""Into how many pieces logits are divided: what is wide exists for so few tokens that it is no matter.

More pieces cost time: each reads the head's weight again, and products of fewer rows keep a device less
busy. So they are as few as leave a piece a small part of what a rank may take.
"""

from collections.abc import Iterator, Mapping

from stepgraph.analysis.row_regions import Region, find_regions
from stepgraph.cost.work import size_in_bytes
from stepgraph.operators.views import viewed
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

_PART = 16  # of a budget: a piece takes less, computed one operation after the other
MOST = 64  # pieces: each is operations of its own


def find_pieces(program: Program, budget: int) -> dict[str, int]:
    """Products of a placed Program that are too wide for a budget -> into how many pieces they go.

    Args:
        budget: bytes of a rank.
    """
    found: dict[str, int] = {}
    for region in find_regions(program, budget // (4 * _PART)):
        pieces = 1
        while pieces < min(MOST, region.rows) and held_bytes(region) * _PART > pieces * budget:
            pieces *= 2
        if pieces > 1:
            found[meta(region.product)["name"]] = min(pieces, region.rows)
    return found


def fewer_and_fewer(pieces: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """Pieces, half as many, and so on, to two."""
    yield pieces
    while most_pieces(pieces) > 2:
        pieces = {name: max(many // 2, 2) for name, many in pieces.items()}
        yield pieces


def most_pieces(pieces: Mapping[str, int]) -> int:
    """Of any product."""
    return max(pieces.values())


def said(pieces: Mapping[str, int] | None) -> str:
    """``, lm_head/mm in 32 pieces``."""
    return "".join(f", {name} in {many} pieces" for name, many in (pieces or {}).items())


def held_bytes(region: Region) -> int:
    """Most bytes of rows that are there at once, if a region is computed one operation after the other."""
    order = [*region.ways]
    last: dict = {}
    for place, node in enumerate(order):
        last[node] = place
        for source in node.all_input_nodes:
            while source is not None and source in region.ways:  # a view holds what it shows
                last[source] = place
                source = viewed(source)
    dies: dict[int, int] = {}
    held = most = 0
    for place, node in enumerate(order):
        held -= dies.pop(place - 1, 0)
        if viewed(node) is None and region.ways[node].result is not None:
            size = size_in_bytes(meta(node)["val"])
            held += size
            dies[last[node]] = dies.get(last[node], 0) + size
        most = max(most, held)
    return most
