"""What pieces of a Program hand on to each other, and what a later one computes anew instead.

One graph of the whole keeps no result of element-wise arithmetic whose operands are kept anyway: it
computes it again where it is read. Pieces do the same, or they would hold more.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.views import viewed
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import WAITS, is_copy
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write, runnable
from stepgraph.torch_internals.code import inputs_of
from stepgraph.torch_internals.operators import TO_COPY
from stepgraph.torch_internals.storages import share_memory, shared_arguments

_DEPTH = 4  # operations between what is read and what is kept
_POINTWISE = {TO_COPY}


def floats(node: fx.Node) -> bool:
    """Whether a node only shows another memory than it was given: whoever reads it may do so itself."""
    if node.op != "call_function" or node.target in WAITS or is_write(node):
        return False
    if node.target is operator.getitem:
        return floats(node.args[0])  # type: ignore[arg-type]
    return viewed(node) is not None


def root_of(node: fx.Node) -> fx.Node:
    """What a view shows."""
    while floats(node):
        node = viewed(node)  # type: ignore[assignment]
    return node


def roots_of(program: Program) -> dict[fx.Node, fx.Node]:
    """:func:`root_of` every node; itself where it is no view."""
    root: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        source = viewed(node)
        root[node] = root[source] if source is not None and floats(node) else node
    return root


Layout = tuple[tuple[int, ...], tuple[int, ...], int]


def layout(node: fx.Node, source: fx.Node, held: torch.Tensor) -> Layout | None:
    """Sizes, strides and offset in ``held`` of what views show; None where those do not say it all.

    Args:
        source: where the views begin.
        held: an example of it.
    """
    base = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")

    def value(of: fx.Node) -> Any:
        if of is source:
            return base
        return runnable(of.target)(*fx.map_arg(of.args, value), **fx.map_arg(of.kwargs, value))

    shown = value(node)
    same = shown.dtype == base.dtype and not (shown.is_conj() or shown.is_neg())
    if not same or not share_memory(shown, base):
        return None
    return tuple(shown.shape), shown.stride(), shown.storage_offset()


def memory(node: fx.Node, piece_of: Mapping[fx.Node, int]) -> fx.Node:
    """What holds a value that is no view, where another piece reads it.

    Of a write its target; of a wait what it waits for, if that is a third piece's.
    """
    while node.op == "call_function":
        apart = piece_of[node] != piece_of.get(node.args[0])  # type: ignore[arg-type]
        if not is_write(node) and not (node.target is torch_internals.WAIT and apart):
            return node
        node = root_of(viewed(node))  # type: ignore[arg-type]
    return node


def computed_anew(
    operations: Sequence[fx.Node], piece_of: Mapping[fx.Node, int], plain: Collection[int] = ()
) -> set[tuple[int, fx.Node]]:
    """Which pieces compute which values of others themselves.

    Args:
        operations: those that are no views, in order.
        piece_of: the piece of each.
        plain: pieces that compute nothing.
    """
    written = {
        root_of(node) for write in filter(is_write, operations) for node in targets_of(write)
    }
    sent: set[fx.Node] = set()  # what is on its way must stay where it is
    reads: list[set[fx.Node]] = [set() for _ in range(max(piece_of.values()) + 1)]
    readers: dict[fx.Node, set[int]] = {}
    for node in operations:
        here = piece_of[node]
        for source in map(root_of, inputs_of(node)):
            held = source if piece_of.get(source) == here else memory(source, piece_of)
            if piece_of.get(held) != here:
                reads[here].add(held)
                readers.setdefault(held, set()).add(here)
            if is_collective(node) or is_copy(node):
                sent.add(held)
    anew: set[tuple[int, fx.Node]] = set()

    def chain(node: fx.Node, piece: int, depth: int) -> list[fx.Node] | None:
        """What a piece has to compute for a value, from what it reads; None: it cannot."""
        found = [node]
        for source in map(root_of, inputs_of(node)):
            if source in written:
                return None
            if source in reads[piece]:
                continue
            below = (
                chain(source, piece, depth + 1) if pointwise(source) and depth < _DEPTH else None
            )
            if below is None:
                return None
            found += below
        return found

    for node in reversed(operations):
        if node not in readers or node in sent or node in written or not pointwise(node):
            continue
        if not readers[node].isdisjoint(plain):
            continue
        chains = [(piece, chain(node, piece, 1)) for piece in readers[node]]
        if any(needed is None for _, needed in chains):
            continue
        for piece, needed in chains:
            reads[piece].discard(node)
            anew |= {(piece, one) for one in needed or ()}
    return anew


def targets_of(write: fx.Node) -> list[fx.Node]:
    """What a write writes into."""
    shared = shared_arguments(write.target, write.args, write.kwargs)
    return [one for writes, one in shared if writes and isinstance(one, fx.Node)]


def pointwise(node: fx.Node) -> bool:
    """Whether an operation is arithmetic, element by element, that costs less than to keep its result."""
    if node.op != "call_function" or is_write(node):
        return False
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    if torch.Tag.pointwise not in tags and node.target not in _POINTWISE:
        return False
    value = meta(node).get("val")
    return isinstance(value, torch.Tensor) and bool(node.all_input_nodes)
