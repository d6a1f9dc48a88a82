"""What brings parameters and takes gradients away runs between repeated layers, not within some of them."""

from collections.abc import Iterable
from itertools import pairwise

from torch import fx

from stepgraph import torch_internals
from stepgraph.lowering.beside import copies, is_of_a_collective
from stepgraph.lowering.handed_on import root_of, targets_of
from stepgraph.lowering.repeats import Layers, Reader
from stepgraph.operators.views import storage_roots
from stepgraph.program.program import Program, is_write
from stepgraph.program.record import program_pass
from stepgraph.torch_internals.code import inputs_of

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


class _Order:
    """Which operations have to stay in their order.

    Two that communicate; and one that changes memory, or makes it, with each that reads it.
    """

    def __init__(self, program: Program, operations: Iterable[fx.Node]) -> None:
        self.root = storage_roots(program)
        self.reads = {node: self._read(node) for node in operations}
        self.changes = {node: self._changed(node) for node in operations}
        self.communicating = {node for node in operations if is_of_a_collective(node)}
        self.changing: dict[fx.Node, list[fx.Node]] = {}  # memory -> by whom it is changed
        self.using: dict[fx.Node, list[fx.Node]] = {}  # or read
        for node in operations:
            for one in self.changes[node]:
                self.changing.setdefault(one, []).append(node)
            for one in self.changes[node] | self.reads[node]:
                self.using.setdefault(one, []).append(node)
        self._bound: dict[fx.Node, set[fx.Node]] = {}

    def bound(self, node: fx.Node) -> set[fx.Node]:
        """What an operation cannot be moved past."""
        if (found := self._bound.get(node)) is None:
            found = self._bound[node] = {
                other
                for memory, others in (
                    (self.reads[node], self.changing), (self.changes[node], self.using)
                )
                for one in memory
                for other in others.get(one, ())
            }  # fmt: skip
            if node in self.communicating:
                found |= self.communicating
        return found

    def _read(self, node: fx.Node) -> set[fx.Node]:
        reads = {self.root[source] for source in inputs_of(node)}
        if node.target is torch_internals.WAIT:  # until then it reads what it sends
            reads |= {self.root[s] for start in node.all_input_nodes for s in start.all_input_nodes}
        return reads

    def _changed(self, node: fx.Node) -> set[fx.Node]:
        writes = {self.root[target] for target in targets_of(node)} if is_write(node) else set()
        return writes | {self.root[node]}


class _Moves:
    """What stands before which operations of layers, while it is moved."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.program = reader, reader.program
        self.order = _Order(self.program, reader.letter)

    def made(self) -> bool:
        """Whether there was anything to move in the order as it is now."""
        self.text, self.moved = self.reader.text(), False
        self.of_layers = [self.text.operations[i] for i in self.text.inside]
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
        passed = self.of_layers[low:high]
        passed += here[number + 1 :] if later else here[:number]
        for between in range(low + 1, high):
            passed += self.between.get(between, ())
        if self.order.bound(node).isdisjoint(passed):
            here.remove(node)
            there = self.between.setdefault(edge, [])
            there.insert(0 if later else len(there), node)
            self.moved = True

    def put_in_order(self) -> None:
        """The Program follows; views go to their first reader."""
        output = self.program.graph.output_node()
        placed: set[fx.Node] = set()

        def put(node: fx.Node) -> None:
            for source in (*inputs_of(node), node):
                if source.op == "call_function" and source not in placed:
                    placed.add(source)
                    if source is not node:
                        put(source)
                    output.prepend(source)

        for place, i in enumerate([*self.text.inside, None]):
            for node in self.between.get(place, ()):
                put(node)
            if i is not None:
                put(self.of_layers[place])
        for node in output.all_input_nodes:
            put(node)
