"""What brings parameters and takes gradients away runs between repeated layers, not within some of them."""

from itertools import pairwise
from typing import NamedTuple

from torch import fx

from stepgraph import torch_internals
from stepgraph.lowering.beside import copies, is_of_a_collective
from stepgraph.lowering.handed_on import root_of, targets_of
from stepgraph.lowering.repeats import Layers, Reader
from stepgraph.operators.views import storage_roots
from stepgraph.program.program import Program, is_write
from stepgraph.program.record import program_pass

_ROUNDS = 3  # where something has gone, layers may be divided in other places


@program_pass(
    reads="repeated layers, and what stands beside them; who reads and writes which memory",
    writes="the order of what stands beside layers",
    functional=False,
)
def communicate_between_layers(program: Program) -> Program:
    """Moves what only some of the repeated layers have within them to where a layer ends, or else begins.

    The collectives of a bucket, say, which is full somewhere in every tenth layer. So all layers are the
    same code. Parts of what was gathered are copied as soon as they are there: layers are given parameters,
    however they came. Otherwise operations of layers keep their order, and so does what stands beside them;
    all of a layer's own collectives stay between the same other collectives.
    """
    reader = Reader(program)
    _copy_parts_at_once(reader)
    moves = _Moves(reader)
    for _ in range(_ROUNDS):
        if not moves.made():
            break
        moves.put_in_order()
    return program.finish()


def _copy_parts_at_once(reader: Reader) -> None:
    """Copies of parts of what is awaited are made right behind the wait."""
    last: dict[fx.Node, fx.Node] = {}  # a wait -> what was put behind it last
    for node in [node for node in reader.letter if node in reader.beside and copies(node)]:
        wait = root_of(node.all_input_nodes[0])
        while copies(wait):  # of a copy that lies otherwise
            wait = root_of(wait.all_input_nodes[0])
        if wait.target is torch_internals.WAIT and not is_write(wait.all_input_nodes[0]):
            point = last.get(wait, wait)
            for one in (*reversed(_steps_between(node, wait)), node):
                if one > point:
                    point.append(one)
                    point = one
            last[wait] = point


def _steps_between(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """What leads from something to an operation that copies a part of it."""
    steps = []
    while (node := node.all_input_nodes[0]) is not source:
        steps.append(node)
    return steps


class _Touched(NamedTuple):
    """What an operation does to memory: what it reads; writes or makes; reads or writes."""

    communicates: bool
    reads: set[fx.Node]
    changes: set[fx.Node]
    uses: set[fx.Node]

    def before(self, other: "_Touched") -> bool:
        """Whether two operations must stay in their order."""
        if self.communicates and other.communicates:
            return True
        return not (self.reads.isdisjoint(other.changes) and self.changes.isdisjoint(other.uses))


class _Moves:
    """What stands before which operations of layers, while it is moved."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.program = reader, reader.program
        self.root = storage_roots(self.program)
        self.touched: dict[fx.Node, _Touched] = {}

    def made(self) -> bool:
        """Whether there was anything to move in the order as it is now."""
        self.text, self.moved = self.reader.text(), False
        self.between = {
            place: [self.text.operations[i] for i in self.text.between(place)]
            for place, cluster in enumerate(self.text.clusters)
            if cluster
        }
        layers, inside = self.text.layers, self.text.inside
        if not layers:
            return False
        for one in layers:
            self.to_edges_of(one)
        places = sorted({0, len(inside)}.union(*(one.boundaries() for one in layers)))
        for start, stop in pairwise(places):
            self.copies_to_end(start, stop)
        return self.moved

    def to_edges_of(self, layers: Layers) -> None:
        """What only some layers have within them goes to where these end, or else begin."""
        period = layers.edges[1] - layers.edges[0]
        irregular: list[tuple[int, int, bool]] = []  # a place, where its layer begins, all of it
        for split in layers.splits:
            filled = [edge for edge in layers.edges[:-1] if edge + split in self.between]
            # All but one have what is fetched for the next layer: that stays.
            seldom = len(filled) < len(layers.edges) - 2
            irregular += [(edge + split, edge, seldom) for edge in filled]
        for place, edge, whole in sorted(irregular, reverse=True):
            for node in reversed(self.between[place]):
                if whole or not is_of_a_collective(node):
                    self.move(node, place, edge + period)
        for place, edge, whole in sorted(irregular):
            for node in list(self.between[place]):
                if whole or not is_of_a_collective(node):
                    self.move(node, place, edge)

    def copies_to_end(self, start: int, stop: int) -> None:
        """What is copied for later within a stretch of operations is copied at its end."""
        for place in reversed(range(start + 1, stop)):
            for node in reversed(self.between.get(place, [])):
                if copies(node):
                    self.move(node, place, stop)

    def move(self, node: fx.Node, place: int, edge: int) -> None:
        """From one place to another; where that changes nothing."""
        here, later = self.between[place], edge > place
        number = here.index(node)
        low, high = sorted((place, edge))
        passed = [self.text.operations[i] for i in self.text.inside[low:high]]
        passed += here[number + 1 :] if later else here[:number]
        for between in range(low + 1, high):
            passed += self.between.get(between, [])
        mine = self.touches(node)
        if not any(mine.before(self.touches(other)) for other in passed):
            here.remove(node)
            there = self.between.setdefault(edge, [])
            there.insert(0 if later else len(there), node)
            self.moved = True

    def touches(self, node: fx.Node) -> _Touched:
        """The memory that an operation reads and changes."""
        found = self.touched.get(node)
        if found is None:
            found = self.touched[node] = self._touches(node)
        return found

    def _touches(self, node: fx.Node) -> _Touched:
        reads = {self.root[source] for source in node.all_input_nodes}
        if node.target is torch_internals.WAIT:  # until then it reads what it sends
            reads |= {self.root[s] for start in node.all_input_nodes for s in start.all_input_nodes}
        writes = {self.root[target] for target in targets_of(node)} if is_write(node) else set()
        made = {self.root[node]}
        return _Touched(is_of_a_collective(node), reads, writes | made, reads | writes)

    def put_in_order(self) -> None:
        """The Program follows; views go to their first reader."""
        output = self.program.graph.output_node()
        placed: set[fx.Node] = set()

        def put(node: fx.Node) -> None:
            for source in (*node.all_input_nodes, node):
                if source.op == "call_function" and source not in placed:
                    placed.add(source)
                    if source is not node:
                        put(source)
                    output.prepend(source)

        for place, i in enumerate([*self.text.inside, None]):
            for node in self.between.get(place, ()):
                put(node)
            if i is not None:
                put(self.text.operations[i])
        for node in output.all_input_nodes:
            put(node)
