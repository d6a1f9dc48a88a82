"""Which tensors an operation really reads and writes, when chains of operations run as one kernel.

A fusing compiler keeps what flows along a chain of pointwise operations and row reductions in registers:
a value costs memory traffic only where it enters such a group or leaves it. Groups are formed as inductor
does it to first order: neighbours that loop over the same number of elements, with no other kernel between.
"""

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.operators.table import CONSTANT
from stepgraph.operators.views import is_view, viewed
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write, tensor_arguments, tensors_of


def assign_traffic(program: Program, fused: bool) -> None:
    """Sets ``meta["traffic"]``, ``meta["starts"]`` and ``meta["dispatched"]`` on every operation.

    Where kernels are fused also ``meta["kernel"]``: the number of the kernel that an operation is part of.

    ``traffic`` is (reads, writes): a bool per tensor argument (in the order of
    :func:`tensor_arguments`), and whether the result goes to memory. ``starts``: whether the operation is
    the first of a kernel; the others of its group share that kernel. ``dispatched``: whether it is called
    by itself, as a view is too.

    Args:
        program: the final one; or the global one, before placement, which copies what is set here.
        fused: what a fusing compiler would merge is counted once; else each operation is a kernel.
    """
    if fused:
        _Groups(program).assign()
        return
    for node in program.operations():
        reads = [not is_view(node)] * len(tensor_arguments(node))
        if node.target is torch_internals.mutable_copy:
            reads[0] = False  # what is written over
        _set(node, tuple(reads), not is_view(node), not is_view(node))
        meta(node).pop("kernel", None)
        meta(node)["dispatched"] = node.target is not operator.getitem


def _set(node: fx.Node, reads: tuple[bool, ...], writes: bool, starts: bool) -> None:
    meta(node)["traffic"] = (reads, writes)
    meta(node)["starts"] = starts
    meta(node)["dispatched"] = False


class _Groups:
    """Groups of operations that are one kernel, found in one walk.

    ``level`` counts kernel boundaries on the longest way to a value: two neighbours of the same level
    have no other kernel between them, so groups never depend on each other in a circle.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        # What each view shows; asked often.
        self.shown = {node: viewed(node) for node in program.graph.nodes if not is_write(node)}
        self.group: dict[fx.Node, int] = {}
        self.parent: list[int] = []
        self.level: dict[fx.Node, int] = {}
        self.loop: dict[fx.Node, int] = {}
        self.of_rows: set[fx.Node] = set()  # one number a row of the loop
        self.readers: dict[fx.Node, int] = {}
        self.fuses = {node: fuses(node) for node in program.operations()}
        self.free: set[fx.Node] = set()  # views, and values made of numbers alone
        # The arguments of each operation, and the operations that made the memory these lie in.
        self.arguments: dict[fx.Node, list[fx.Node]] = {}
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self.results = [self._whole(node) for node in program.results]

    def assign(self) -> None:
        """Sets the metadata of every operation."""
        operations = list(self.program.operations())
        for node in operations:
            self._join(node)
        kernel = {node: self._find(group) for node, group in self.group.items()}
        written = self._written(operations, kernel)
        read: set[tuple[int, fx.Node]] = set()
        started: set[int] = set()
        for node in operations:
            arguments = self.arguments[node]
            if node in self.free:
                _set(node, (False,) * len(arguments), False, False)
                continue
            group = meta(node)["kernel"] = kernel[node]
            reads = []
            pairs = zip(arguments, self.sources[node], strict=True)
            for position, (argument, source) in enumerate(pairs):
                value = self._whole(argument)
                outside = kernel.get(source) != group and not _is_target(node, position)
                reads.append(outside and (group, value) not in read and not _is_constant(value))
                read.add((group, value))
            _set(node, tuple(reads), node in written, group not in started)
            started.add(group)

    def _join(self, node: fx.Node) -> None:
        arguments = self.arguments[node] = tensor_arguments(node)
        sources = self.sources[node] = [*map(self._producer, arguments)]
        if self.shown.get(node) is not None or _is_constant(node):
            self.free.add(node)
            self.level[node] = max((self.level.get(s, 0) for s in sources), default=0)
            return
        self._find_loop(node, sources)
        self.group[node] = len(self.parent)
        self.parent.append(len(self.parent))
        together = [s for s in sources if self._one_kernel(s, node)]
        levels = [self.level.get(s, 0) + (s in self.group and s not in together) for s in sources]
        level = self.level[node] = max(levels, default=0)
        for source in together:
            if self.level[source] == level:
                self.parent[self._find(self.group[source])] = self._find(self.group[node])

    def _find_loop(self, node: fx.Node, sources: list[fx.Node]) -> None:
        self.loop[node] = _loop_size(node)
        if is_reduction(node) and over_rows(node):
            self.of_rows.add(node)
            return
        # What is computed of a row's sum belongs to the loop over the rows: a norm is one kernel.
        rows = [s for s in sources if s in self.of_rows and _numel(s) == self.loop[node]]
        if rows and self.fuses[node]:
            self.of_rows.add(node)
            self.loop[node] = max(self.loop[source] for source in rows)

    def _one_kernel(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether a compiler would put a reader into the kernel of the value that it reads."""
        if source not in self.group or meta(source)["phase"] != meta(node)["phase"]:
            return False
        if not self.fuses[source] or not self.fuses[node]:
            return False
        if is_reduction(source) and not over_rows(source):
            return False
        if self.loop[source] == self.loop[node]:
            return True
        # A smaller loop is repeated inside a larger one where nobody else wants its values.
        smaller = self.loop[source] < self.loop[node] and source not in self.of_rows
        return smaller and self._readers(source) == 1

    def _producer(self, node: fx.Node) -> fx.Node:
        """The operation that made the memory a value lies in."""
        while (source := self.shown.get(node)) is not None:
            node = source
        return node

    def _whole(self, node: fx.Node) -> fx.Node:
        """The value of which a node is a view that shows all of it, or the node itself."""
        while (source := self.shown.get(node)) is not None:
            if node.target is operator.getitem or _numel(source) != _numel(node):
                break
            node = source
        return node

    def _readers(self, node: fx.Node) -> int:
        """How many operations read a value, or views of it; a mask's are counted once for all layers."""
        if node not in self.readers:
            self.readers[node] = sum(
                self._readers(user) if self.shown.get(user) is node else 1 for user in node.users
            )
        return self.readers[node]

    def _find(self, group: int) -> int:
        while self.parent[group] != group:
            self.parent[group] = self.parent[self.parent[group]]
            group = self.parent[group]
        return group

    def _written(self, operations: list[fx.Node], kernel: Mapping[fx.Node, int]) -> set[fx.Node]:
        """Operations whose value something outside their kernel, or the caller, reads."""
        written = {self._producer(node) for node in self.results}
        for node in operations:
            if self.shown.get(node) is not None:
                continue
            own = kernel.get(node)
            for position, source in enumerate(self.sources[node]):
                if kernel.get(source, own) != own and not _is_target(node, position):
                    written.add(source)
        return written


def _is_target(node: fx.Node, position: int) -> bool:
    """Whether an argument is only written over."""
    return node.target is torch_internals.mutable_copy and position == 0


def _numel(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in tensors_of(meta(node).get("val")))


def _is_constant(node: fx.Node) -> bool:
    return node.op == "call_function" and operators.of(node.target).fusing == CONSTANT


def fuses(node: fx.Node) -> bool:
    """Whether a compiler makes one kernel of an operation and what it reads, or what reads it."""
    if is_collective(node) or node.target is torch_internals.WAIT:
        return False
    known = operators.of(node.target)
    return known.fusing is not None or known.reduces


def is_reduction(node: fx.Node) -> bool:
    """Whether an operation adds up, or compares, elements of its argument."""
    return operators.of(node.target).reduces


def over_rows(node: fx.Node) -> bool:
    """Whether a reduction runs over the innermost dimension alone."""
    source = next(iter(node.all_input_nodes), None)
    if source is None or len(node.args) < 2:
        return False
    dims: Any = node.args[1]
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return False
    rank = meta(source)["val"].dim()
    return rank > 0 and dims[0] % rank == rank - 1


def _loop_size(node: fx.Node) -> int:
    """Elements that a kernel of this operation visits."""
    sizes = [tensor.numel() for tensor in tensors_of(meta(node).get("val"))]
    if is_reduction(node):
        sizes += [_numel(argument) for argument in node.all_input_nodes]
    return max(sizes, default=0)
