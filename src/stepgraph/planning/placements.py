"""Placements as text, and back: ``S(0)R`` for (Shard(0), Replicate())."""

import functools
import re

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.planning.decisions import OperationPlacement
from stepgraph.program.layout import InnerShard, Placements, show
from stepgraph.program.shards import REDUCTIONS

MOST_DIMS = 64
_ONE = re.compile(r"R|S\(([0-9]{1,2})(?:/([0-9]{1,9}))?\)|P(?:\(([a-z]+)\))?")


@functools.lru_cache(4096)
def parse_placements(text: str) -> Placements:
    """The inverse of :func:`stepgraph.program.layout.show`.

    Raises:
        ValueError: unknown placements, or a dimension that no tensor has.
    """
    found: list[Placement] = []
    position = 0
    while position < len(text):
        match = _ONE.match(text, position)
        if match is None:
            raise ValueError(f"unknown placement {text[position : position + 20]!r}")
        found.append(_one(match))
        position = match.end()
    return tuple(found)


def _one(match: re.Match[str]) -> Placement:
    kind, (dim, blocks, reduction) = match[0][0], match.groups()
    if kind == "R":
        return Replicate()
    if kind == "P":
        if reduction not in (None, *REDUCTIONS):
            raise ValueError(f"unknown placement {match[0]!r}: no such reduction")
        return Partial(reduction or "sum")
    if int(dim) >= MOST_DIMS:
        raise ValueError(f"unknown placement {match[0]!r}: no tensor has {dim} dimensions")
    if blocks is None:
        return Shard(int(dim))
    if int(blocks) < 2:
        raise ValueError(f"unknown placement {match[0]!r}: two blocks at least")
    return InnerShard(int(dim), int(blocks))


def show_operation(operation: OperationPlacement) -> str:
    """``S(0)R R -> S(0)R``: each tensor argument as it is read, each result; ``-`` for no tensor."""
    results = ["-" if p is None else show(p) for p in operation.outputs]
    return " ".join([*map(show, operation.inputs), "->", *results])


@functools.lru_cache(4096)
def parse_operation(text: str) -> OperationPlacement:
    """The inverse of :func:`show_operation`.

    Raises:
        ValueError: not of that form.
    """
    arguments, arrow, results = text.partition("->")
    if not arrow:
        raise ValueError(f"placements of an operation look like 'R R -> R', not {text[:40]!r}")
    return OperationPlacement(
        tuple(parse_placements(part) for part in arguments.split()),
        tuple(None if part == "-" else parse_placements(part) for part in results.split()),
    )
