"""Which values are in no memory where a compiler fuses operations, and which lie where another one was.

What inductor does, to first order. A value of element-wise arithmetic, or of that of rows, is computed
where it is read, if only fused kernels read it and it is not too much to do: nearby always (with few
products, collectives or sums over columns between), further on where what it is computed of is read nearby
as well. A kernel writes over what it is the last to read, if a fused kernel made that. In doubt a value is
in memory: no less may be foreseen than a step takes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.cost.traffic import fuses, is_reduction, over_rows
from stepgraph.operators import table as operators
from stepgraph.operators.table import CONSTANT, LOOP, ROWS
from stepgraph.operators.views import storage_roots
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write, tensors_of
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
class Registers:
    """Of a Program's values.

    ``until``: those that are in no memory, with the position of the last kernel that computes them, which
    reads what they are made of.
    ``over``: those that are written over another one, which ends there.
    """

    until: Mapping[fx.Node, int] = field(default_factory=dict)
    over: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


def find_registers(program: Program) -> Registers:
    """Of a Program as it is executed; linear in its size."""
    values = _Values(program)
    return Registers(values.until, values.written_over())


class _Values:
    """Walks a Program: which values are inlined, from the last one to the first."""

    def __init__(self, program: Program) -> None:
        root = storage_roots(program)
        operations = list(program.operations())
        self.position = {node: i for i, node in enumerate(operations)}
        # Those that compute something: a view does not.
        self.nodes = [node for node in operations if root[node] is node or is_write(node)]
        self.sources = {
            node: _unique(map(root.__getitem__, node.all_input_nodes)) for node in self.nodes
        }
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node, sources in self.sources.items():
            for source in sources:
                self.readers.setdefault(source, []).append(node)
        self.written: set[fx.Node] = set()  # parameters that are trained, for one
        for write in filter(is_write, self.nodes):
            shared = shared_arguments(write.target, write.args, write.kwargs)
            targets = (one for writes, one in shared if writes and isinstance(one, fx.Node))
            self.written |= {root[one] for one in targets}
        self.held = self.written | {root[node] for node in program.results}  # others find it there
        # How many kernels of their own, or sums over columns, stand before each operation.
        self.alone = [0]
        for node in operations:
            own = node in self.sources and (not fuses(node) or _is_of_columns(node))
            self.alone.append(self.alone[-1] + own)
        self.last: dict[fx.Node, int] = {}  # position of the last kernel that reads it
        self.read_in: dict[fx.Node, set[int]] = {}  # between which kernels of their own
        self.until: dict[fx.Node, int] = {}
        self._inline(set())
        self._inline(self._large())

    def _inline(self, large: Collection[fx.Node]) -> None:
        """``large``: what is too much to be computed where it is read."""
        self.last, self.read_in, self.until = {}, {}, {}
        kept = self.held | {*large}
        depth: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            here, end = self.position[node], self.last.get(node)
            inlined = end is not None and _is_inlined(node) and node not in kept
            if inlined and all(map(fuses, self.readers[node])):
                below = 1 + max(depth.get(reader, 0) for reader in self.readers[node])
                nearby = self.alone[here] + _NEARBY
                elsewhere = {place for place in self.read_in[node] if place > nearby}
                if not elsewhere:
                    self.until[node] = end
                elif below <= _DEPTH and _is_elementwise(node) and self._is_there(node, elsewhere):
                    self.until[node], depth[node] = end, below
            read_in = self.read_in[node] if node in self.until else {self.alone[here]}
            for source in self.sources[node]:
                self.last[source] = max(self.last.get(source, -1), self.until.get(node, here))
                self.read_in.setdefault(source, set()).update(read_in)

    def _large(self) -> set[fx.Node]:
        """What reads so much memory, or takes so many steps, that a compiler keeps it.

        What is read into something larger is read several times over; draws are long.
        """
        reads, steps = dict[fx.Node, int](), dict[fx.Node, int]()
        once: set[fx.Node] = set()
        found: set[fx.Node] = set()
        for node in self.nodes:
            known, sources = operators.of(node.target), self.sources[node]
            inside = [source for source in sources if source in self.until and source not in found]
            reads[node] = len(sources) - len(inside) + sum(map(reads.__getitem__, inside))
            steps[node] = (_COSTLY if known.cost else 2) + sum(map(steps.__getitem__, inside))
            by_host = known.cost in _ONCE_ON_HOST and _is_on_host(node)
            if by_host or known.cost == "random" or once & {*inside}:
                once.add(node)
            readers, size = self.readers.get(node, ()), _bytes(node)
            several = len(readers) > 1 or any(_bytes(reader) > size for reader in readers)
            most = _READS_BY_SEVERAL if several else _READS
            too_much = reads[node] > most or steps[node] > _STEPS or (several and node in once)
            if node in self.until and too_much:
                found.add(node)
        return found

    def _is_there(self, node: fx.Node, elsewhere: set[int]) -> bool:
        """Whether others read all that a value is computed of nearby, too, and nobody writes there."""
        if self.written & {*self.sources[node]}:
            return False
        for source in self.sources[node]:
            others = self.read_in.get(source, ())
            if not all(any(abs(one - other) <= _NEARBY for other in others) for one in elsewhere):
                return False
        return True

    def written_over(self) -> dict[fx.Node, fx.Node]:
        """Result of a fused kernel -> what it is the last to read, of one size, in the same stretch."""
        found: dict[fx.Node, fx.Node] = {}
        taken: set[fx.Node] = set()
        for node in self.nodes:
            here = self.position[node]
            if node in self.until or is_write(node) or not fuses(node) or not _bytes(node):
                continue
            for source in self._read(node):
                ends = self.last[source] == here and source not in taken and source not in self.held
                if ends and self._fits(source, node):
                    found[node] = source
                    taken.add(source)
                    break
        return found

    def _fits(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether one compiled piece surely makes both, and as large as each other."""
        near = self.alone[self.position[source]] == self.alone[self.position[node]]
        return near and fuses(source) and not _joins(source) and _bytes(source) == _bytes(node)

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """What the kernel of an operation reads of others' results in memory."""
        found = []
        for source in self.sources[node]:
            if source in self.until:
                found += self._read(source)
            elif source.op == "call_function":
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


def _is_on_host(node: fx.Node) -> bool:
    made = tensors_of(meta(node).get("val"))
    return bool(made) and made[0].device.type == torch_internals.host_device().type


def _bytes(node: fx.Node) -> int:
    """Of a value that is one tensor."""
    made = tensors_of(meta(node).get("val"))
    return made[0].nbytes if len(made) == 1 else 0
