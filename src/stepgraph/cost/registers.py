"""Which values are in no memory where a compiler fuses operations, and which lie where another one was.

What inductor does, to first order. A value of element-wise arithmetic, or of that of rows, is computed
where it is read, if only fused kernels read it and it is not too much to do: nearby always (with few
products, collectives or sums over columns between), further on where what it is computed of is read nearby
as well. A kernel writes over what it is the last to read, if a fused kernel made that. In doubt a value is
in memory: no less may be foreseen than a step takes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.cost.traffic import fuses, is_reduction, over_rows
from stepgraph.cost.work import size_in_bytes
from stepgraph.operators import table as operators
from stepgraph.operators.table import CONSTANT, LOOP, ROWS
from stepgraph.operators.views import storage_roots
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write, tensors_of
from stepgraph.torch_internals.code import inputs_of
from stepgraph.torch_internals.storages import shared_arguments

aten = torch.ops.aten

_DEPTH = 4  # operations that a later kernel computes anew, one behind the other
# Kernels of their own: a gate is read behind the next product, in the backward behind two.
_NEARBY = 2
# What is computed where it is read, by one kernel or by several: reads of memory, steps of arithmetic
# (torch._inductor.config, realize_acc_reads_threshold and the two beside it, as for a GPU).
_READS, _READS_BY_SEVERAL, _STEPS = 8, 4, 30
# Steps of an operator that has a cost of its own: an exponential, a draw.
_COSTLY = 8
# On the host what has an exponential, a logarithm or a tanh in it is computed once for all who read it
# (torch._inductor.ir, should_realize_on_reuse).
_ONCE_ON_HOST = {
    "exp", "tanh", "gelu", "gelu_backward", "softmax", "safe_softmax", "log_softmax", "softmax_backward",
}  # fmt: skip


@dataclass(frozen=True)
class Anew:
    """A value that a piece computes for itself: in memory from ``begin`` to ``end``, or in none.

    ``until``: the position of the last kernel that computes it.
    """

    begin: int
    end: int
    until: int
    in_memory: bool


@dataclass(frozen=True)
class Registers:
    """Of a Program's values.

    ``until``: those that are in no memory, with the position of the last kernel that computes them, which
    reads what they are made of.
    ``over``: those that are written over another one, which ends there.
    ``anew``: what pieces compute for themselves, by piece and operation.
    """

    until: Mapping[fx.Node, int] = field(default_factory=dict)
    over: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    anew: Mapping[tuple[int, fx.Node], Anew] = field(default_factory=dict)


def find_registers(program: Program) -> Registers:
    """Of a Program as it is executed; linear in its size.

    Where it is compiled in pieces, operations have the number of their ``piece``, and those of pieces that
    compute them ``anew_in`` theirs.
    """
    values = _Values(program)
    until = {made.node: end for made, end in values.until.items() if not made.anew}
    return Registers(until, values.written_over(), values.anew())


def piece_of(node: fx.Node) -> int:
    """The piece that an operation is compiled in; 0: there are none."""
    return meta(node).get("piece", 0)


@dataclass(eq=False, slots=True)
class _Made:
    """A value where one piece makes it: at the position of its operation, or of the first that reads it."""

    node: fx.Node
    piece: int
    at: int
    anew: bool = False


_Value = _Made | fx.Node  # inputs are made nowhere


class _Values:
    """Walks a Program: which values are inlined, from the last one to the first."""

    def __init__(self, program: Program) -> None:
        root = storage_roots(program)
        operations = list(program.operations())
        self.position = {node: i for i, node in enumerate(operations)}
        # Those that compute something: a view does not.
        nodes = [node for node in operations if root[node] is node or is_write(node)]
        read = {node: _unique(map(root.__getitem__, inputs_of(node))) for node in nodes}
        self.fuses = {node: fuses(node) for node in nodes}
        self.inlined = {node: _is_inlined(node) for node in nodes}
        self.made = self._made(nodes, read)
        self.order = sorted(
            self.made.values(), key=lambda one: (one.at, not one.anew, self.position[one.node])
        )
        first = {one.node: one for one in self.order if not one.anew}
        self.sources: dict[_Made, list[_Value]] = {}
        self.readers: dict[_Value, list[_Made]] = {}
        self.held: set[_Value] = set()  # others find it there
        for one in self.order:
            self.sources[one] = [
                self.made.get((one.piece, source)) or first.get(source, source)
                for source in read[one.node]
            ]
            for source in self.sources[one]:
                self.readers.setdefault(source, []).append(one)
                if isinstance(source, _Made) and source.piece != one.piece:
                    self.held.add(source)
        self.written: set[_Value] = set()  # parameters that are trained, for one
        for write in filter(is_write, nodes):
            shared = shared_arguments(write.target, write.args, write.kwargs)
            targets = (root[one] for writes, one in shared if writes and isinstance(one, fx.Node))
            self.written |= {first.get(one, one) for one in targets}
        self.held |= self.written | {first.get(root[node], node) for node in program.results}
        # How many kernels of their own, or sums over columns, stand before each operation.
        self.alone = [0]
        for node in operations:
            own = node in first and (not self.fuses[node] or _is_of_columns(node))
            self.alone.append(self.alone[-1] + own)
        self.last: dict[_Value, int] = {}  # position of the last kernel that reads it
        self.read_in: dict[_Value, set[int]] = {}  # between which kernels of their own
        self.until: dict[_Made, int] = {}
        self._inline(set())
        self._inline(self._large())

    def _made(
        self, nodes: Sequence[fx.Node], read: Mapping[fx.Node, Sequence[fx.Node]]
    ) -> dict[tuple[int, fx.Node], _Made]:
        """Each operation in its piece, and in those that compute it anew."""
        made = {(piece_of(n), n): _Made(n, piece_of(n), self.position[n]) for n in nodes}
        readers: dict[tuple[int, fx.Node], int] = {}  # where a piece begins to read what
        for node in reversed(nodes):
            own = piece_of(node)
            for piece in (own, *meta(node).get("anew_in", ())):
                if piece != own:
                    made[piece, node] = _Made(node, piece, readers[piece, node], anew=True)
                at = made[piece, node].at
                for source in read[node]:  # what is computed anew is read where its own reader is
                    readers[piece, source] = min(at, readers.get((piece, source), at))
        return made

    def _inline(self, large: Collection[_Value]) -> None:
        """``large``: what is too much to be computed where it is read."""
        self.last, self.read_in, self.until = {}, {}, {}
        kept = self.held | {*large}
        depth: dict[_Made, int] = {}
        for one in reversed(self.order):
            here, end = one.at, self.last.get(one)
            inlined = end is not None and self.inlined[one.node] and one not in kept
            if inlined and all(self.fuses[reader.node] for reader in self.readers[one]):
                below = 1 + max(depth.get(reader, 0) for reader in self.readers[one])
                nearby = self.alone[here] + _NEARBY
                elsewhere = {place for place in self.read_in[one] if place > nearby}
                if not elsewhere:
                    self.until[one] = end
                elif (
                    below <= _DEPTH and _is_elementwise(one.node) and self._is_there(one, elsewhere)
                ):
                    self.until[one], depth[one] = end, below
            read_in = self.read_in[one] if one in self.until else {self.alone[here]}
            for source in self.sources[one]:
                self.last[source] = max(self.last.get(source, -1), self.until.get(one, here))
                self.read_in.setdefault(source, set()).update(read_in)

    def _large(self) -> set[_Value]:
        """What reads so much memory, or takes so many steps, that a compiler keeps it.

        What is read into something larger is read several times over; draws are long.
        """
        reads, steps = dict[_Value, int](), dict[_Value, int]()
        once: set[_Value] = set()
        found: set[_Value] = set()
        for one in self.order:
            node = one.node
            known, sources = operators.of(node.target), self.sources[one]
            inside = [source for source in sources if source in self.until and source not in found]
            reads[one] = len(sources) - len(inside) + sum(map(reads.__getitem__, inside))
            steps[one] = (_COSTLY if known.cost else 2) + sum(map(steps.__getitem__, inside))
            by_host = known.cost in _ONCE_ON_HOST and computed_on_host(node)
            if by_host or known.cost == "random" or once & {*inside}:
                once.add(one)
            readers, size = self.readers.get(one, ()), _bytes(node)
            several = len(readers) > 1 or any(_bytes(reader.node) > size for reader in readers)
            most = _READS_BY_SEVERAL if several else _READS
            too_much = reads[one] > most or steps[one] > _STEPS or (several and one in once)
            if one in self.until and too_much:
                found.add(one)
        return found

    def _is_there(self, one: _Made, elsewhere: set[int]) -> bool:
        """Whether others read all that a value is computed of nearby, too, and nobody writes there."""
        if self.written & {*self.sources[one]}:
            return False
        for source in self.sources[one]:
            others = self.read_in.get(source, ())
            if not all(any(abs(one - other) <= _NEARBY for other in others) for one in elsewhere):
                return False
        return True

    def anew(self) -> dict[tuple[int, fx.Node], Anew]:
        """What pieces compute for themselves.

        One kernel makes it with whatever else is made of what it reads, earlier or later than it is read.
        """
        found = {}
        for one in self.order:
            if not one.anew:
                continue
            beside = {one.at, self.last[one]}
            if one not in self.until:
                beside |= self._beside(one)
            until = self.until.get(one, max(beside))
            found[one.piece, one.node] = Anew(
                min(beside), max(beside), until, one not in self.until
            )
        return found

    def _beside(self, one: _Made) -> set[int]:
        """Where its piece makes something else, nearby, of what it is made of."""
        found, sources = set[int](), [*self.sources[one]]
        for source in sources:
            if source in self.until:
                sources += self.sources[source]
            readers = [
                r for r in self.readers[source] if r.piece == one.piece and self.fuses[r.node]
            ]
            found |= {self.until.get(reader, reader.at) for reader in readers}
        near = self.alone[one.at]
        return {at for at in found if abs(self.alone[at] - near) <= _NEARBY}

    def written_over(self) -> dict[fx.Node, fx.Node]:
        """Result of a fused kernel -> what it is the last to read, of one size, in the same stretch."""
        found: dict[fx.Node, fx.Node] = {}
        taken: set[_Made] = set()
        for one in self.order:
            node = one.node
            if (
                one in self.until
                or one.anew
                or is_write(node)
                or not self.fuses[node]
                or not _bytes(node)
            ):
                continue
            for source in self._read(one):
                ends = (
                    self.last[source] == one.at and source not in taken and source not in self.held
                )
                if ends and self._fits(source.node, node):
                    found[node] = source.node
                    taken.add(source)
                    break
        return found

    def _fits(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether one compiled piece surely makes both, and as large as each other."""
        near = self.alone[self.position[source]] == self.alone[self.position[node]]
        return near and self.fuses[source] and not _joins(source) and _bytes(source) == _bytes(node)

    def _read(self, one: _Made) -> list[_Made]:
        """What the kernel of an operation reads of others' results in memory."""
        found = []
        for source in self.sources[one]:
            if source in self.until:
                found += self._read(source)
            elif isinstance(source, _Made) and not source.anew:
                found.append(source)
        return found


def _unique(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def _is_inlined(node: fx.Node) -> bool:
    known = operators.of(node.target)
    is_loop = known.fusing in (LOOP, ROWS, CONSTANT) and not known.reduces
    return is_loop and not is_write(node) and not _joins(node)


def _joins(node: fx.Node) -> bool:
    """Whether parts are put together, each by its own kernel, in memory that stays theirs."""
    return node.target in (aten.cat.default, aten.stack.default)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a later piece of a program computes it anew: what is drawn is kept."""
    known = operators.of(node.target)
    return known.fusing == LOOP and (known.elementwise or known.copies) and not known.draws


def _is_of_columns(node: fx.Node) -> bool:
    return is_reduction(node) and not over_rows(node)


def computed_on_host(node: fx.Node) -> bool:
    """Whether what an operation makes lies in the host's memory."""
    made = tensors_of(meta(node).get("val"))
    return bool(made) and made[0].device.type == torch_internals.host_device().type


def _bytes(node: fx.Node) -> int:
    """Of a value that is one tensor."""
    value = meta(node).get("val")
    return size_in_bytes(value) if len(tensors_of(value)) == 1 else 0
