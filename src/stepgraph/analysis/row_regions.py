"""Finds what of a Program can be computed some rows at a time: a head, its loss, and their backward.

From a product on, whose result is wide (logits), everything that has its width in each row, and what stands
between such values: forward and backward together, up to where a row becomes a number, a product brings it
back to the width of the model, or rows are added up. That is found from what operations do with rows
(:mod:`stepgraph.operators.by_rows`), whatever the loss is made of. It can be computed in pieces if nothing
in it needs a sum over all rows, and nothing that it reads depends on what it makes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.by_rows import PRODUCTS, by_rows, takes_the_type
from stepgraph.operators.rows import Rows, Way
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, OPTIMIZER, Program

aten = torch.ops.aten

_HEADS = (aten.mm.default, aten.addmm.default)
_FEW = 4  # operations between a wide value and a number of each row that is made of it
# Given by a caller between forward and backward: nothing that reads it can run beside the forward.
_GIVEN_LATE = (roles.Tangent, roles.ResultTangent, roles.GivenGrad, roles.Saved)


@dataclass(frozen=True)
class Region:
    """What is computed some rows at a time.

    Attributes:
        product: where it begins.
        rows: how many there are.
        ways: its operations, in order, and how each computes some rows.
        results: those of them that others read: rows that are no longer wide, or sums over all of them.
        earlier: what it reads that stands behind the product, in order: all of that can run before.
    """

    product: fx.Node
    rows: int
    ways: dict[fx.Node, Way]
    results: list[fx.Node]
    earlier: list[fx.Node]


def find_regions(program: Program, least: int) -> list[Region]:
    """Regions of a Program, the last first.

    Args:
        least: bytes of a product's result that is worth it.
    """
    found: list[Region] = []
    taken: set[fx.Node] = set()
    position = _positions(program)
    for node in reversed(list(program.operations(FORWARD))):
        if node.target in _HEADS and node not in taken and _bytes(node) >= least:
            region = _region_at(program, node, position)
            if region is not None and _narrows(region) and taken.isdisjoint(region.ways):
                found.append(region)
                taken |= region.ways.keys()
    return found


def find_region(program: Program, product: fx.Node) -> Region | None:
    """The region that begins at a product; None where it cannot be computed in pieces."""
    return _region_at(program, product, _positions(program))


def _region_at(program: Program, product: fx.Node, position: dict[fx.Node, int]) -> Region | None:
    if product.target not in _HEADS or meta(product)["val"].shape[0] < 2:
        return None
    return _Search(program, product, position).region()


def _positions(program: Program) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(program.graph.nodes)}


def _narrows(region: Region) -> bool:
    """Whether what remains of rows is less than they were: a head is; another product may not be."""
    rows = (node for node in region.results if region.ways[node].result is not None)
    return sum(map(_bytes, rows)) < _bytes(region.product)


def _bytes(node: fx.Node) -> int:
    value = meta(node)["val"]
    return value.numel() * value.element_size()


@dataclass
class _Search:
    program: Program
    product: fx.Node
    position: dict[fx.Node, int]
    ways: dict[fx.Node, Way] = field(default_factory=dict)
    rows_of: dict[fx.Node, Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        value = meta(self.product)["val"]
        self.rows, self.width = value.shape[0], value.shape[1]

    def region(self) -> Region | None:
        if not (self._follow() and self._end() and self._agrees()):
            return None
        read = {a for way in self.ways.values() for a in way.arguments} - self.ways.keys()
        made = _reached(self.ways, through=lambda _: True)
        if read & made:
            return None
        earlier = self._earlier(read)
        if earlier is None:
            return None
        ways = {node: self.ways[node] for node in sorted(self.ways, key=self.position.__getitem__)}
        results = [node for node in ways if any(user not in ways for user in node.users)]
        return Region(self.product, self.rows, ways, results, earlier)

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether a row of a value is about as wide as one of the product."""
        value = meta(node).get("val")
        return isinstance(value, torch.Tensor) and 2 * value.numel() >= self.rows * self.width

    def _follow(self) -> bool:
        """All that is wide of what the product leads to, what stands between, and what that is made of."""
        reached = _reached([self.product], through=lambda node: node.target not in PRODUCTS)
        reached = {node for node in reached if node.target not in PRODUCTS} | {self.product}
        inside: set[fx.Node] = set()
        for node in sorted(reached, key=self.position.__getitem__, reverse=True):
            if self._is_wide(node) or not inside.isdisjoint(node.users):
                inside.add(node)
        hidden = self.product.args[-2]
        assert isinstance(hidden, fx.Node)
        for node in sorted(inside, key=self.position.__getitem__):
            start = {hidden: Rows(0)} if node is self.product else {}
            known = start | {a: self.rows_of[a] for a in node.all_input_nodes if a in self.rows_of}
            way = by_rows(node, known)
            if way is None or way.result is None:
                return False
            self.ways[node], self.rows_of[node] = way, way.result
        self._take_in(inside)
        return True

    def _take_in(self, readers: Iterable[fx.Node]) -> None:
        """Wide values that are read by what is inside alone are computed there, if that can be."""
        left = {a for node in readers for a in self.ways[node].arguments if a not in self.ways}
        while left:
            node = max(left, key=self.position.__getitem__)
            left.remove(node)
            read_by = (self.ways[user].arguments for user in node.users if user in self.ways)
            wanted = {arguments[node] for arguments in read_by if node in arguments}
            (rows,) = wanted if len(wanted) == 1 else (None,)
            mine = not node.all_input_nodes or all(user in self.ways for user in node.users)
            if node.op != "call_function" or rows is None or not mine:
                continue
            many = rows.many(meta(node)["val"].shape) == self.rows
            worth = self._is_wide(node) or self._is_beside_wide(node)
            ways = self._ways_to(node, rows) if many and worth else None
            if ways is not None:
                self.ways |= ways
                self.rows_of |= {one: rows for one in ways}  # noqa: C420: pyright types it so
                left |= {a for way in ways.values() for a in way.arguments if a not in self.ways}

    def _ways_to(self, node: fx.Node, rows: Rows) -> dict[fx.Node, Way] | None:
        """How a value is computed, with rows where they are wanted; what is waited for, with its wait."""
        found: dict[fx.Node, Way] = {}
        waits = node.target is torch_internals.WAIT
        for one in (node, *(node.all_input_nodes if waits else ())):
            way = by_rows(one, {}, rows)
            if way is None:
                return None
            found[one] = way
        return found

    def _is_beside_wide(self, node: fx.Node) -> bool:
        """Whether a narrow value is made, in a few steps, of a wide one that is read inside as well."""
        stack = [(node, _FEW)]
        while stack:
            node, left = stack.pop()
            for source in node.all_input_nodes if left else ():
                if self._is_wide(source) and any(user in self.ways for user in source.users):
                    return True
                stack.append((source, left - 1))
        return False

    def _end(self) -> bool:
        """What reads wide values from outside computes pieces, too: of rows that are narrow, or sums."""
        for node in list(self.ways):
            for user in node.users if self._is_wide(node) else ():
                if user in self.ways:
                    continue
                if user.op != "call_function" or meta(user)["phase"] == OPTIMIZER:
                    return False
                if not node.all_input_nodes:  # a constant, which others have for themselves
                    continue
                known = {a: self.rows_of[a] for a in user.all_input_nodes if a in self.rows_of}
                way = self._way_of_end(user, known)
                if way is None or is_collective(user):  # its wait would be outside
                    return False
                self.ways[user] = way
        return True

    def _agrees(self) -> bool:
        """Whether what is made in pieces is read as those pieces: not whole, and not as other rows."""
        return all(
            (rows is not None and rows == self.ways[argument].result) or takes_the_type(node)
            for node, way in self.ways.items()
            for argument, rows in way.arguments.items()
            if argument in self.ways
        )

    def _way_of_end(self, user: fx.Node, known: dict[fx.Node, Rows]) -> Way | None:
        """Of a product of rows with rows: those that are not from here stand where the others are."""
        if user.target is aten.mm.default and len(known) == 1:
            one, other = user.args
            if known.get(one) == Rows(1) and other is not one:  # type: ignore[arg-type]
                known = {**known, other: Rows(0)}  # type: ignore[dict-item]
            elif known.get(other) == Rows(0):  # type: ignore[arg-type]
                known = {**known, one: Rows(1)}  # type: ignore[dict-item]
        return by_rows(user, known)

    def _earlier(self, read: set[fx.Node]) -> list[fx.Node] | None:
        """What leads to what is read and stands behind the product; None: some of it cannot run there."""
        late = {n for role, n, _ in self.program.input_rows if isinstance(role, _GIVEN_LATE)}
        found: set[fx.Node] = set()
        stack = list(read)
        while stack:
            node = stack.pop()
            behind = self.position[node] > self.position[self.product]
            if node in late or (node.op == "call_function" and meta(node)["phase"] == OPTIMIZER):
                return None
            if behind and node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return sorted(found, key=self.position.__getitem__)


def _reached(start: Iterable[fx.Node], through) -> set[fx.Node]:
    """What reads values, and what reads that, not of the update; ``through``: whether to go on behind."""
    found: set[fx.Node] = set()
    stack = list(start)
    first = set(stack)
    while stack:
        node = stack.pop()
        for user in node.users if node in first or through(node) else ():
            computes = user.op == "call_function" and meta(user)["phase"] != OPTIMIZER
            if computes and user not in found:
                found.add(user)
                stack.append(user)
    return found
