"""Levels that are worth a look: the named policies, and what the trade-off of one block finds best.

Of blocks of one kind one is looked at; what it keeps are positions, which are the same in all.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from stepgraph.memory.kept_operations import first_residual, kept_operations
from stepgraph.memory.presets import FULL, NONE, OPS
from stepgraph.memory.solver.blocks import Blocks, Level, positions
from stepgraph.memory.solver.tradeoff import Kept, Tradeoff
from stepgraph.operators.views import is_view
from stepgraph.program.metadata import meta

HALVES = "full but the first residual"
_ALL = 6  # so many values that may be kept: every set of them is a level
_BETWEEN = 5  # levels between what keeps least and what keeps most, where blocks repeat
_ALONE = 15  # and where one block is all there is


@dataclass(frozen=True)
class Costs:
    """What a level costs in each kind of block: seconds of recomputation, and bytes that are kept."""

    seconds: tuple[float, ...]
    bytes: tuple[int, ...]


def find_levels(
    blocks: Blocks, seconds: Mapping[fx.Node, float], few: bool = False
) -> dict[Level, Costs]:
    """Levels for all kinds of blocks of a Program, with what they cost; all is kept by the first.

    Args:
        seconds: of forward operations.
        few: a Program that takes long to simulate.
    """
    kinds = range(max(blocks.kinds) + 1)
    tradeoffs = [_tradeoff(blocks, blocks.first_of(kind), seconds) for kind in kinds]
    named = {
        NONE: None,
        FULL: lambda block: (),
        OPS: kept_operations,
        HALVES: first_residual,
    }
    found: dict[Level, Costs] = {}

    def add(name: str, kept: Sequence[frozenset[fx.Node] | None]) -> None:
        places = tuple(
            None if nodes is None else positions(tradeoff.block, nodes & tradeoff.droppable)
            for nodes, tradeoff in zip(kept, tradeoffs, strict=True)
        )
        if any(one.kept == places for one in found):
            return
        measured = [t.measure(nodes) for t, nodes in zip(tradeoffs, kept, strict=True)]
        costs = Costs(tuple(m.seconds for m in measured), tuple(m.bytes for m in measured))
        found[Level(name, places)] = costs

    for name, choose in named.items():
        add(name, [None if choose is None else frozenset(choose(t.block)) for t in tradeoffs])
    if len(blocks.blocks) == 1 and len(tradeoffs[0].choices) <= _ALL:
        for nodes in _every_set(tradeoffs[0].choices):
            add(_name_of([nodes]), [nodes])
    else:
        between = _ALONE if len(blocks.blocks) == 1 and not few else _BETWEEN
        for kept in zip(*(_between(tradeoff, between) for tradeoff in tradeoffs), strict=True):
            add(_name_of([one.nodes for one in kept]), [one.nodes for one in kept])
    if blocks.gathers:
        for level in [level for level in found if level.name in (NONE, FULL, OPS)]:
            costs = found[level]
            more = (blocks.gathered_bytes(blocks.first_of(kind)) for kind in kinds)
            held = tuple(map(sum, zip(costs.bytes, more, strict=True)))
            name = f"{level.name}, parameters gathered once"
            found[Level(name, level.kept, True)] = Costs(costs.seconds, held)
    return found


def _tradeoff(blocks: Blocks, number: int, seconds: Mapping[fx.Node, float]) -> Tradeoff:
    block = blocks.blocks[number]
    names = {*blocks.dropped(number, frozenset())}
    droppable = {node for node in block if meta(node)["name"] in names}
    return Tradeoff(block, droppable, blocks.free(number), seconds)


def _between(tradeoff: Tradeoff, count: int) -> Iterator[Kept]:
    """Least time within evenly spaced numbers of bytes, from the least that can be kept on."""
    least, most = tradeoff.least_bytes(), tradeoff.measure(None)
    yield least
    for bytes in np.linspace(least.bytes, most.bytes, count + 1)[:-1]:
        yield tradeoff.least_seconds(float(bytes)) or least


def _every_set(choices: Sequence[fx.Node]) -> Iterator[frozenset[fx.Node]]:
    for count in range(len(choices) + 1):
        for nodes in itertools.combinations(choices, count):
            yield frozenset(nodes)


def _name_of(kept: Sequence[frozenset[fx.Node]]) -> str:
    """By what is kept of the first kind of block: operations without their layer."""
    shown = sorted({_inside(node) for nodes in kept for node in nodes if not is_view(node)})
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"full but {', '.join(shown[:3])}{more}" if shown else FULL


def _inside(node: fx.Node) -> str:
    """``self_attn.q_proj/mm`` of ``model.layers.3.self_attn.q_proj/mm``."""
    parts = meta(node)["name"].split(".")
    last = max((i for i, part in enumerate(parts[:-1]) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])
