"""Which values are in no memory where a compiler fuses operations, and which lie where another one was.

What inductor does, to first order. Element-wise arithmetic, and that of rows, which only fused kernels read
is computed where it is read: between two kernels of their own (a product, a collective) always; further on
where what it is computed of is kept anyway. A kernel writes over what it is the last to read, if a fused
kernel made that. In doubt a value is in memory: no less may be foreseen than a step takes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from stepgraph.operators import table as operators
from stepgraph.operators.table import CONSTANT, LOOP, ROWS
from stepgraph.operators.views import storage_roots
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write, tensors_of
from stepgraph.torch_internals.storages import shared_arguments

_DEPTH = 4  # operations that a later kernel computes anew, one behind the other
_READS, _READS_FOR_SEVERAL = 8, 4  # of memory by what is computed anew: for one reader, for several


@dataclass(frozen=True)
class Registers:
    """Of a Program's values.

    ``until``: those that are in no memory, with the position of the last kernel that computes them.
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
        self.root = root = storage_roots(program)
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
        self.held = {root[node] for node in program.results}  # where others find it
        for write in filter(is_write, self.nodes):
            shared = shared_arguments(write.target, write.args, write.kwargs)
            self.held |= {
                root[one] for writes, one in shared if writes and isinstance(one, fx.Node)
            }
        # How many kernels of their own stand before each operation.
        self.alone = [0]
        for node in operations:
            own = node in self.sources and not _fuses(node)
            self.alone.append(self.alone[-1] + own)
        self.last: dict[fx.Node, int] = {}  # position of the last kernel that reads it
        self.until: dict[fx.Node, int] = {}
        self._inline(set())
        self._inline(self._large())

    def _inline(self, large: Collection[fx.Node]) -> None:
        """``large``: what reads too much for that."""
        self.last, self.until = {}, {}
        depth: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            here, end = self.position[node], self.last.get(node)
            inlined = (
                end is not None
                and _is_inlined(node)
                and node not in self.held
                and node not in large
            )
            if inlined and all(map(_fuses, self.readers[node])):
                below = 1 + max(depth.get(reader, 0) for reader in self.readers[node])
                if self.alone[end] == self.alone[here + 1]:
                    self.until[node] = end
                elif below <= _DEPTH and _is_elementwise(node) and self._stays(node, end):
                    self.until[node], depth[node] = end, below
            for source in self.sources[node]:
                self.last[source] = max(self.last.get(source, -1), self.until.get(node, here))

    def _large(self) -> set[fx.Node]:
        """What is computed from so much in memory that a compiler writes it down."""
        reads: dict[fx.Node, int] = {}
        found = set()
        for node in self.nodes:
            inlined = (s in self.until and s not in found for s in self.sources[node])
            sources = zip(self.sources[node], inlined, strict=True)
            reads[node] = sum(reads[source] if inline else 1 for source, inline in sources)
            most = _READS_FOR_SEVERAL if len(self.readers.get(node, ())) > 1 else _READS
            if node in self.until and reads[node] > most:
                found.add(node)
        return found

    def _stays(self, node: fx.Node, end: int) -> bool:
        """Whether others need all that a value is computed of up to the same stretch."""
        made = (source for source in self.sources[node] if source.op == "call_function")
        reached = self.alone[end]
        return all(_is_constant(s) or self.alone[self.last.get(s, 0)] >= reached for s in made)

    def written_over(self) -> dict[fx.Node, fx.Node]:
        """Result of a fused kernel -> what it is the last to read, of one size, in the same stretch."""
        found: dict[fx.Node, fx.Node] = {}
        taken: set[fx.Node] = set()
        for node in self.nodes:
            here = self.position[node]
            if node in self.until or is_write(node) or not _fuses(node) or not _bytes(node):
                continue
            for source in self._read(node):
                near = self.alone[self.position[source]] == self.alone[here] and _fuses(source)
                ends = self.last[source] == here and source not in self.held | taken
                if near and ends and _bytes(source) == _bytes(node):
                    found[node] = source
                    taken.add(source)
                    break
        return found

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


def _fuses(node: fx.Node) -> bool:
    known = operators.of(node.target)
    return not is_collective(node) and (known.fusing is not None or known.reduces)


def _is_inlined(node: fx.Node) -> bool:
    known = operators.of(node.target)
    return known.fusing in (LOOP, ROWS, CONSTANT) and not known.reduces and not is_write(node)


def _is_elementwise(node: fx.Node) -> bool:
    return operators.of(node.target).fusing == LOOP


def _is_constant(node: fx.Node) -> bool:
    return operators.of(node.target).fusing == CONSTANT


def _bytes(node: fx.Node) -> int:
    """Of a value that is one tensor."""
    made = tensors_of(meta(node).get("val"))
    return made[0].nbytes if len(made) == 1 else 0
