"""Levels that are worth a look: the named policies, and what the trade-off of one block finds best.

Of blocks of one kind one is looked at; what it keeps are positions, which are the same in all.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from stepgraph.cost.work import size_in_bytes
from stepgraph.memory.kept_operations import first_residual, kept_operations
from stepgraph.memory.presets import FULL, NONE, OPS
from stepgraph.memory.solver.blocks import Blocks, Level, positions
from stepgraph.memory.solver.tradeoff import Kept, Tradeoff
from stepgraph.operators.views import is_view
from stepgraph.planning.sizes import show_bytes
from stepgraph.program.metadata import meta

HALVES = "full but the first residual"
TWICE = "full, communicated twice"
OFFLOADED = (NONE, FULL, OPS)  # levels of which what is kept may wait on the host as well
POLICIES = (NONE, FULL, OPS, HALVES, TWICE)
_ALL = 6  # so many values that may be kept: every set of them is a level
_BETWEEN = 5  # levels between what keeps least and what keeps most, where blocks repeat
_ALONE = 15  # and where one block is all there is

# A name, and what each kind of block keeps; None: all of it.
_Choice = tuple[str, Sequence[frozenset[fx.Node] | None]]


@dataclass(frozen=True)
class Costs:
    """What a level costs in each kind of block: seconds of recomputation, and bytes that are kept."""

    seconds: tuple[float, ...]
    bytes: tuple[int, ...]


def find_levels(
    blocks: Blocks, seconds: Mapping[fx.Node, float], few: bool = False, to_host: bool = False
) -> dict[Level, Costs]:
    """Levels for all kinds of blocks of a Program, with what they cost; all is kept by the first.

    Those that come to the same as one before are left out.

    Args:
        seconds: of forward operations.
        few: a Program that takes long to simulate.
        to_host: the device has a link to memory of the host.
    """
    kinds = range(max(blocks.kinds) + 1)
    tradeoffs, wider = (
        [_tradeoff(blocks, blocks.first_of(kind), seconds, communicates) for kind in kinds]
        for communicates in (False, True)
    )
    found: dict[Level, Costs] = {}
    met: set[tuple] = set()
    exact = len(blocks.blocks) == 1 and len(tradeoffs[0].choices) <= _ALL
    choices = _every_set(tradeoffs[0]) if exact else _between_named(blocks, tradeoffs, few)
    for name, chosen in itertools.chain(_named(tradeoffs), choices):
        _add(found, met, name, chosen, tradeoffs, exact)
    _add(found, met, TWICE, [frozenset() for _ in kinds], wider)
    if blocks.gathers:
        held = [blocks.gathered_bytes(blocks.first_of(kind)) for kind in kinds]
        for level in [level for level in found if level.name in (NONE, FULL, OPS, TWICE)]:
            costs = found[level]
            sizes = tuple(own + more for own, more in zip(costs.bytes, held, strict=True))
            level = replace(level, name=f"{level.name}, parameters gathered once", gathered=True)
            found[level] = Costs(costs.seconds, sizes)
    for level in [level for level in found if to_host and level.name in OFFLOADED]:
        nothing = Costs(found[level].seconds, (0,) * len(tradeoffs))
        found[replace(level, name=f"{level.name}, offloaded", offloads=True)] = nothing
    return found


def _named(tradeoffs: Sequence[Tradeoff]) -> Iterator[_Choice]:
    """What named policies keep."""
    yield NONE, [None for _ in tradeoffs]
    yield FULL, [frozenset() for _ in tradeoffs]
    for name, keeps in ((OPS, kept_operations), (HALVES, first_residual)):
        yield name, [frozenset(keeps(tradeoff.block)) for tradeoff in tradeoffs]


def _between_named(blocks: Blocks, tradeoffs: Sequence[Tradeoff], few: bool) -> Iterator[_Choice]:
    """What is best kept within several numbers of bytes."""
    between = _ALONE if len(blocks.blocks) == 1 and not few else _BETWEEN
    for kept in zip(*(_between(tradeoff, between) for tradeoff in tradeoffs), strict=True):
        nodes = [one.nodes or frozenset() for one in kept]
        yield _name_of(nodes), nodes


def _add(
    found: dict[Level, Costs],
    met: set[tuple],
    name: str,
    chosen: Sequence[frozenset[fx.Node] | None],
    tradeoffs: Sequence[Tradeoff],
    exact: bool = False,
) -> None:
    """A level more, unless one before computes the same again; or costs the same, if neither is a policy's.

    Args:
        exact: also what costs the same: it may take less when it is needed.
    """
    pairs = list(zip(tradeoffs, chosen, strict=True))
    kept = [t.measure(None if nodes is None else nodes & t.droppable) for t, nodes in pairs]
    key = tuple((one.again, one.bytes) for one in kept)
    cost = tuple((round(one.seconds, 9), one.bytes) for one in kept)
    if key not in met and (exact or cost not in met or name in POLICIES):
        met |= {key, cost}
        places = tuple(
            None if one.nodes is None else positions(t.block, one.nodes)
            for one, t in zip(kept, tradeoffs, strict=True)
        )
        costs = Costs(tuple(one.seconds for one in kept), tuple(one.bytes for one in kept))
        if any(level.name == name for level in found):
            name = f"{name}, {show_bytes(sum(costs.bytes))} a block"
        found[Level(name, places, communicates=tradeoffs[0].communicates)] = costs


def _tradeoff(
    blocks: Blocks, number: int, seconds: Mapping[fx.Node, float], communicates: bool
) -> Tradeoff:
    block = blocks.blocks[number]
    names = {*blocks.dropped(number, frozenset(), communicates)}
    droppable = {node for node in block if meta(node)["name"] in names}
    return Tradeoff(block, droppable, blocks.free(number), seconds, communicates)


def _between(tradeoff: Tradeoff, count: int) -> Iterator[Kept]:
    """Least time within evenly spaced numbers of bytes, from the least that can be kept on."""
    least, most = tradeoff.least_bytes(), tradeoff.measure(None)
    yield least
    for bytes in np.linspace(least.bytes, most.bytes, count + 1)[:-1]:
        yield tradeoff.least_seconds(float(bytes)) or least


def _every_set(tradeoff: Tradeoff) -> Iterator[_Choice]:
    """Everything that may be kept of a block."""
    for count in range(len(tradeoff.choices) + 1):
        for nodes in map(frozenset, itertools.combinations(tradeoff.choices, count)):
            yield _name_of([nodes]), [nodes]


def _name_of(kept: Sequence[frozenset[fx.Node]]) -> str:
    """By what is kept, the largest first: operations without their layer."""
    nodes = [node for nodes in kept for node in nodes if not is_view(node)]
    nodes.sort(key=lambda node: (-size_in_bytes(meta(node)["val"]), meta(node)["name"]))
    shown = list(dict.fromkeys(map(_inside, nodes)))
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"full but {', '.join(shown[:3])}{more}" if shown else FULL


def _inside(node: fx.Node) -> str:
    """``self_attn.q_proj/mm`` of ``model.layers.3.self_attn.q_proj/mm``."""
    parts = meta(node)["name"].split(".")
    last = max((i for i, part in enumerate(parts[:-1]) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])
