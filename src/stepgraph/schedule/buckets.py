"""Which small collectives run as one: a call costs what copying megabytes costs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.blocks import repetitions
from stepgraph.analysis.layers import layers_of
from stepgraph.cost.collectives import moved_bytes
from stepgraph.operators.views import is_view
from stepgraph.planning.target import Target
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.torch_internals import operators as private
from stepgraph.torch_internals.kept import PLANNED

aten = torch.ops.aten
# Their result is their argument, laid out anew or in another type.
_COPIES = frozenset({aten.clone.default, private.TO_COPY})


@dataclass(frozen=True)
class Sizes:
    """Bytes of a flat collective's larger side.

    Attributes:
        large: above this a collective gains nothing from company, and loses a copy.
        reduction, gather: of one flat collective.
        table: below this a copy costs less than one more collective.
    """

    large: int
    reduction: int
    gather: int
    table: int

    def most(self, target: Any) -> int:
        """Of one flat collective of a kind; 0: it is never merged."""
        if target in (torch_internals.ALL_REDUCE, torch_internals.REDUCE_SCATTER):
            return self.reduction
        return self.gather if target is torch_internals.ALL_GATHER else 0


def sizes_for(target: Target) -> Sizes:
    """How large a flat collective is, by what a call costs on a target.

    A member is copied into the flat one, and out of it: above twice the bytes that are copied in the time
    of a call, a collective gains nothing from company. Reductions end in long-lived gradients, so a large
    one costs no memory; gathers bring parameters early, which does.
    """
    large, table = _power_of_two(2 * target.call_bytes), _power_of_two(target.call_bytes / 8)
    return Sizes(large, reduction=2 * large, gather=large, table=table)


def _power_of_two(size: float) -> int:
    return 2 ** round(math.log2(max(size, 1)))


@dataclass
class _Bucket:
    """Collectives in order, and their bytes.

    ``read``: where the first of their readers stands; ``there``: the last of what stands before them.
    """

    members: list[fx.Node] = field(default_factory=list)
    size: int = 0
    read: float = math.inf
    there: float = -1

    def add(self, node: fx.Node, position: Mapping[fx.Node, float]) -> bool:
        """Puts a collective in, where all can still run as one; whether they can."""
        first = position[self.members[0] if self.members else node]
        read = min(self.read, _first_reader(node, position))
        there = max(self.there, position[_anchored(node.args[0])])
        if self.members and read <= position[node] and there >= first:
            return False
        self.members.append(node)
        self.size += moved_bytes(node)
        self.read, self.there = read, there
        return True


def find_buckets(program: Program, sizes: Sizes) -> tuple[tuple[str, ...], ...]:
    """Runs of small collectives that can be one, by stable name.

    None of what a plan has decided before, and none of pieces of rows: together they were the whole.
    """
    position = positions(program)
    layer = {
        node: (phase, number)
        for phase in (FORWARD, BACKWARD)
        for number, nodes in enumerate(layers_of(program, phase))
        for node in nodes
    }
    alike: dict[tuple, list[fx.Node]] = {}
    large: Counter[tuple] = Counter()
    for node in program.operations():
        decided = meta(node).get("checkpoint") == PLANNED or "rows_piece" in meta(node)
        if not sizes.most(node.target) or decided:
            continue
        kind = (node.target, meta(node)["phase"])
        if moved_bytes(node) > sizes.large:
            large[kind] += 1
            continue
        width = _width(node, sizes.table)
        key = (*kind, node.args[1:], meta(node)["val"].dtype, width)
        alike.setdefault(key, []).append(node)
    found: list[_Bucket] = []
    for (target, phase, *_), nodes in alike.items():
        most = sizes.most(target)
        torn = [layer.get(_within(one)) == layer.get(_within(two)) for one, two in pairwise(nodes)]
        room = _room_at_layers(nodes, [0, *torn, 0], most, large[target, phase])
        found.append(bucket := _Bucket())
        for node in nodes:
            wanted = room.get(node, moved_bytes(node))
            if bucket.size + wanted > most or not bucket.add(node, position):
                found.append(bucket := _Bucket())
                bucket.add(node, position)
    several = [bucket.members for bucket in found if len(bucket.members) > 1]
    several.sort(key=lambda nodes: position[nodes[-1]])
    return tuple(tuple(meta(node)["name"] for node in nodes) for nodes in several)


def _within(collective: fx.Node) -> fx.Node:
    """An operation of a collective's layer: that reads what it gathers, or makes what it sums up."""
    if collective.target is not torch_internals.ALL_GATHER:
        return collective.all_input_nodes[0]
    (node,) = collective.users
    while node.users and (node.target is torch_internals.WAIT or is_view(node)):
        node = min(node.users)
    return node


def _room_at_layers(
    nodes: list[fx.Node], torn: list[int], most: int, large: int
) -> dict[fx.Node, float]:
    """What a bucket must have room for to go on at the first collective of a repeated layer.

    Buckets hold whole layers, and as many each, as far as that goes: the layers are then the same programs
    around them, which are compiled once. Layers that wait for large collectives in any case have one each.

    Args:
        torn: 1 where a collective is of the same layer as the one before.
        large: how many collectives of this kind are too large for company.
    """
    letters = [(tuple(meta(node)["val"].shape), node.args[1:]) for node in nodes]
    room: dict[fx.Node, float] = {}
    for edges in _edges_of_layers(letters, torn) or repetitions(letters, torn):
        layer = sum(map(moved_bytes, nodes[edges[0] : edges[1]]))
        layers = len(edges) - 1
        most_layers = 1 if large >= layers else max(1, most // layer)
        together = math.ceil(layers / math.ceil(layers / most_layers))
        room |= {nodes[edge]: math.inf for edge in edges[together:-1:together]}
        room[nodes[edges[0]]] = together * layer if together > 1 else math.inf
    return room


def _edges_of_layers(letters: list[tuple], torn: list[int]) -> list[list[int]]:
    """Where consecutive layers that communicate alike begin and end; empty where no layers are known."""
    starts = [place for place, same in enumerate(torn) if not same]
    found: list[list[int]] = []
    for start, stop in pairwise(starts):
        before = found[-1][-2:] if found else [0, 0]
        if letters[slice(*before)] == letters[start:stop]:
            found[-1].append(stop)
        else:
            found.append([start, stop])
    return [edges for edges in found if len(edges) > 2]


def _width(node: fx.Node, table: int) -> int:
    """The row length of a table to be reduced, which goes below others of that length; else 0.

    A matmul whose result is whole rows of a ``cat`` is computed there by inductor; flattened, it would be
    copied.
    """
    is_table = node.target is torch_internals.ALL_REDUCE and meta(node)["val"].dim() > 1
    return meta(node)["val"].shape[-1] if is_table and moved_bytes(node) >= table else 0


def positions(program: Program) -> dict[fx.Node, float]:
    """Where each node stands."""
    return {node: i for i, node in enumerate(program.graph.nodes)}


def _first_reader(node: fx.Node, position: Mapping[fx.Node, float]) -> float:
    """Where the result of a collective is first read, past its wait and its copies."""
    (wait,) = node.users
    readers = {user for made in [wait, *copied_behind(node)] for user in made.users}
    read = (position[reader] for reader in readers if not only_copies(reader))
    return min(read, default=len(position))


def can_run_last(members: list[fx.Node], position: Mapping[fx.Node, float]) -> bool:
    """Whether all can run where the last one stands: nobody reads any of them before."""
    last = position[members[-1]]
    return all(_first_reader(member, position) > last for member in members)


def can_run_first(members: list[fx.Node], position: Mapping[fx.Node, float]) -> bool:
    """Whether all can run where the first one stands: their inputs are there, or can be."""
    first = position[members[0]]
    return all(position[_anchored(member.args[0])] < first for member in members)


def copied_before(member: fx.Node) -> list[fx.Node]:
    """What makes a collective's input of a parameter alone (a shard turned and copied), in order."""
    made, node = [], member.args[0]
    while node is not _anchored(member.args[0]):
        made.append(node)
        (node,) = node.all_input_nodes  # type: ignore[union-attr]
    return made[::-1]


def copied_behind(member: fx.Node) -> list[fx.Node]:
    """What only lays a collective's result out anew, in order."""
    (wait,) = member.users
    made, found = [wait], list[fx.Node]()
    while made:
        copies = [user for user in made.pop(0).users if only_copies(user) and user not in found]
        found += copies
        made += copies
    return found


def _anchored(source: Any) -> fx.Node:
    """What has to stand before a collective of ``source``."""
    node = source
    while only_copies(node):
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" else source


def only_copies(node: fx.Node) -> bool:
    """Whether a node lays one value out anew, or shows a part of it."""
    return node.op == "call_function" and (
        node.target in _COPIES or (is_view(node) and node.target is not torch_internals.WAIT)
    )
