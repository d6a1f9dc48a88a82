"""Rows that a head finds gathered over ranks (sequence parallelism), where it is computed in pieces.

A piece is then the same few rows of every rank: only these are gathered for it, and what it makes for the
ranks' own rows is added up and scattered at once, so that neither is there whole. All else that the head
reads by rows is put into the order of pieces once, and rows that others read are put back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.row_regions import Region
from stepgraph.operators.rows import Rows
from stepgraph.operators.views import NAMES_A_SHAPE
from stepgraph.program.build import Builder
from stepgraph.program.collectives import contiguous
from stepgraph.program.metadata import meta

aten = torch.ops.aten


@dataclass(frozen=True)
class GatheredRows:
    """The rows of a region in pieces of every rank's own.

    Attributes:
        front: this rank's rows, along dimension 0.
        gather: the collective that gathers them.
        hidden: what the region's product reads of it.
        sizes: rows as the whole has them: outer ones, ranks, pieces, a rank's rows in a piece, inner ones.
        scattered: results -> what a reduce-scatter makes of them for this rank.
    """

    front: fx.Node
    gather: fx.Node
    hidden: fx.Node
    sizes: tuple[int, int, int, int, int]
    scattered: dict[fx.Node, fx.Node]

    def gathered(self, emit: Builder, number: int) -> fx.Node:
        """The rows of one piece."""
        *_, own, _ = self.sizes
        mine = emit(aten.slice.Tensor, self.front, 0, number * own, (number + 1) * own)
        whole = emit(self.gather.target, contiguous(emit, mine), *self.gather.args[1:])
        width = meta(self.hidden)["val"].shape[-1]
        return emit(aten.view.default, emit(torch_internals.WAIT, whole), [-1, width])

    def ordered(self, emit: Builder, flat: fx.Node, dim: int) -> fx.Node:
        """A value with the rows of the whole along a dimension, one piece after the other."""
        return self._moved(emit, flat, dim, self.sizes, (2, 1, 3, 0, 4))

    def restored(self, emit: Builder, flat: fx.Node, dim: int) -> fx.Node:
        """The reverse of :meth:`ordered`."""
        outer, ranks, pieces, own, inner = self.sizes
        return self._moved(emit, flat, dim, (pieces, ranks, own, outer, inner), (3, 1, 0, 2, 4))

    @staticmethod
    def _moved(
        emit: Builder, flat: fx.Node, dim: int, sizes: tuple[int, ...], order: tuple[int, ...]
    ) -> fx.Node:
        shape = list(meta(flat)["val"].shape)
        apart = emit(
            aten.view.default, contiguous(emit, flat), [*shape[:dim], *sizes, *shape[dim + 1 :]]
        )
        behind = range(dim + len(sizes), len(shape) + len(sizes) - 1)
        moved = emit(aten.permute.default, apart, [*range(dim), *(dim + i for i in order), *behind])
        return emit(aten.view.default, contiguous(emit, moved), shape)

    def summed(self, emit: Builder, result: fx.Node, part: fx.Node) -> fx.Node:
        """What a reduce-scatter makes of a piece of a result."""
        end = self.scattered[result]
        scatter = end.args[0]
        assert isinstance(scatter, fx.Node)
        *_, own, _ = self.sizes
        shape = meta(end)["val"].shape
        front = emit(aten.view.default, part, [self.sizes[1] * own, *shape[1:]])
        return emit(torch_internals.WAIT, emit(scatter.target, front, *scatter.args[1:]))


def find_gathered_rows(region: Region, pieces: int) -> GatheredRows | None:
    """How a region's rows are gathered, where it alone reads them and they are divided evenly."""
    hidden = region.product.args[-2]
    assert isinstance(hidden, fx.Node)
    back = [*_back_from(hidden)]
    wait = back[-1]
    if wait.target is not torch_internals.WAIT:
        return None
    gather = wait.all_input_nodes[0]
    readers = [region.ways.keys(), *({node} for node in back)]
    if gather.target is not torch_internals.ALL_GATHER or any(
        not node.users.keys() <= read for node, read in zip([*back, gather], readers, strict=True)
    ):
        return None
    front, ranks = gather.args[:2]
    assert isinstance(front, fx.Node) and isinstance(ranks, int)
    shape = meta(wait)["val"].shape
    own = meta(front)["val"].shape[0]
    swapped = any(node.target is aten.transpose.int for node in back)
    outer = shape[1] if swapped else 1
    inner = math.prod(shape[1 + swapped : -1])
    columns = swapped and len(shape) == 2  # which are no rows
    if shape[:-1].numel() != region.rows or own * ranks != shape[0] or own % pieces or columns:
        return None
    scattered = {
        node: end
        for node in region.results
        if region.ways[node].result == Rows(0)
        and (end := _scattered(node, gather, swapped)) is not None
    }
    sizes = outer, ranks, pieces, own // pieces, inner
    return GatheredRows(front, gather, hidden, sizes, scattered)


def _back_from(hidden: fx.Node) -> Iterator[fx.Node]:
    """A value, and what it is made of by flattening rows and by putting the second dimension first."""
    yield hidden
    if hidden.target in NAMES_A_SHAPE:
        (hidden,) = hidden.all_input_nodes
        yield hidden
    if hidden.target is aten.clone.default:
        (moved,) = hidden.all_input_nodes
        if moved.target is aten.transpose.int and _swaps_or_none(moved):
            yield from (moved, *moved.all_input_nodes)


def _scattered(result: fx.Node, gather: fx.Node, swapped: bool) -> fx.Node | None:
    """What a reduce-scatter makes of a result, the reverse of the gather; None: others read it, too."""
    targets = [torch_internals.REDUCE_SCATTER, torch_internals.WAIT]
    if swapped:
        targets = [aten.transpose.int, aten.clone.default, *targets]
    if any(user.target is aten.view.default for user in result.users):
        targets = [aten.view.default, *targets]
    chain = [result]
    for target in targets:
        if len(chain[-1].users) != 1:
            return None
        chain += chain[-1].users
        node = chain[-1]
        if node.target is not target or (swapped and not _swaps_or_none(node)):
            return None
    *_, front, scatter, end = chain
    same_rows = meta(front)["val"].shape == meta(gather)["val"].shape
    return end if same_rows and scatter.args[-2:] == gather.args[-2:] else None


def _swaps_or_none(node: fx.Node) -> bool:
    """Whether a node is no transposition, or one of the first two dimensions."""
    return node.target is not aten.transpose.int or node.args[1:] in ((0, 1), (1, 0))
