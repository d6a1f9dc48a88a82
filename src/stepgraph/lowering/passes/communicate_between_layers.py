"""What brings parameters and takes gradients away runs between repeated layers, not within some of them."""

from itertools import pairwise

from torch import fx

from stepgraph import torch_internals
from stepgraph.lowering.beside import copies, find_beside
from stepgraph.lowering.handed_on import root_of, targets_of
from stepgraph.lowering.repeats import Layers, Text, read
from stepgraph.operators.views import storage_roots
from stepgraph.program.collectives import communicates
from stepgraph.program.program import Program, is_write
from stepgraph.program.record import program_pass


@program_pass(
    reads="repeated layers, and what stands beside them; who reads and writes which memory",
    writes="the order of what stands beside layers",
    functional=False,
)
def communicate_between_layers(program: Program, fuses: bool) -> Program:
    """Moves what only some of the repeated layers have within them to where a layer ends, or else begins.

    The collectives of a bucket, say, which is full somewhere in every tenth layer. So all layers are the
    same code. Parts of what was gathered are copied as soon as they are there: layers are given parameters,
    however they came. Otherwise operations of layers keep their order, and so does what stands beside them;
    all of a layer's own collectives stay between the same other collectives.

    Args:
        fuses: the lowering makes one kernel of several operations.
    """
    if not fuses:
        return program
    _copy_parts_at_once(program)
    text = read(program)
    moves = _Moves(program, text)
    for layers in text.layers:
        moves.to_edges_of(layers)
    places = sorted({0, len(text.inside)}.union(*(one.boundaries() for one in text.layers)))
    for start, stop in pairwise(places):
        moves.copies_to_end(start, stop)
    if moves.moved:
        _put_in_order(program, text, moves.between)
    return program.finish()


def _copy_parts_at_once(program: Program) -> None:
    """Copies of parts of what is awaited are made right behind the wait."""
    beside = find_beside(program)
    last: dict[fx.Node, fx.Node] = {}  # a wait -> what was put behind it last
    for node in [node for node in program.operations() if node in beside and copies(node)]:
        wait = root_of(node.args[0])  # type: ignore[arg-type]
        if wait.target is torch_internals.WAIT:
            point = last.get(wait, wait)
            for one in (*reversed(_views_between(node, wait)), node):
                if one > point:
                    point.append(one)
                    point = one
            last[wait] = point


def _views_between(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """What shows an operation a part of something else."""
    views = []
    while (node := node.all_input_nodes[0]) is not source:
        views.append(node)
    return views


class _Moves:
    """What stands before which operations of layers, while it is moved."""

    def __init__(self, program: Program, text: Text) -> None:
        self.text, self.moved = text, False
        self.between = {
            place: [text.operations[i] for i in text.between(place)]
            for place, cluster in enumerate(text.clusters)
            if cluster
        }
        self.root = storage_roots(program)

    def to_edges_of(self, layers: Layers) -> None:
        """What only some layers have within them goes to where they end, or else begin."""
        count = len(layers.edges) - 1
        seldom: list[
            tuple[int, int]
        ] = []  # where a layer begins, and how far behind something stands
        for split in layers.splits:
            filled = [edge for edge in layers.edges[:-1] if edge + split in self.between]
            # All but one have what is fetched for the next layer.
            seldom += [(edge, split) for edge in filled] if len(filled) < count - 1 else []
        period = layers.edges[1] - layers.edges[0]
        for edge, split in sorted(seldom, reverse=True):
            self.move(edge + split, edge + period)
        for edge, split in sorted(seldom):
            self.move(edge + split, edge)

    def move(self, place: int, edge: int) -> None:
        """All that stands somewhere, to another place; where that changes nothing."""
        nodes = self.between.get(place, [])
        low, high = sorted((place, edge))
        if any(other in self.between for other in range(low + 1, high)):
            return
        if not self.may_pass(nodes, low, high):
            return
        there = self.between.pop(edge, [])
        self.moved |= bool(nodes)
        self.between.pop(place, None)
        both = nodes + there if edge > place else there + nodes
        if both:
            self.between[edge] = both

    def copies_to_end(self, start: int, stop: int) -> None:
        """What is copied for later within a stretch of operations is copied at its end."""
        passed: list[fx.Node] = []
        for place in reversed(range(start + 1, stop)):
            passed.append(self.text.operations[self.text.inside[place]])
            for node in reversed(self.between.get(place, [])):
                if copies(node) and not any(self.depend(node, other) for other in passed):
                    self.moved = True
                    self.between[place].remove(node)
                    self.between.setdefault(stop, []).insert(0, node)
                else:
                    passed.append(node)

    def may_pass(self, nodes: list[fx.Node], low: int, high: int) -> bool:
        """Whether operations may stand on the other side of some that are layers'."""
        inside = [self.text.operations[i] for i in self.text.inside[low:high]]
        return not any(self.depend(node, one) for node in nodes for one in inside)

    def depend(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two operations must stay in their order."""
        if _is_of_a_collective(one) and _is_of_a_collective(other):
            return True
        reads, writes, makes = self.touches(one)
        reads_too, writes_too, makes_too = self.touches(other)
        return not (
            reads.isdisjoint(makes_too | writes_too)
            and (makes | writes).isdisjoint(reads_too | writes_too)
        )

    def touches(self, node: fx.Node) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
        """The memory that an operation reads, writes and makes."""
        reads = {self.root[source] for source in node.all_input_nodes}
        if node.target is torch_internals.WAIT:  # until then it reads what it sends
            reads |= {self.root[s] for start in node.all_input_nodes for s in start.all_input_nodes}
        writes = {self.root[target] for target in targets_of(node)} if is_write(node) else set()
        return reads, writes, {self.root[node]}


def _is_of_a_collective(node: fx.Node) -> bool:
    return communicates(node) or node.target is torch_internals.WAIT


def _put_in_order(program: Program, text: Text, between: dict[int, list[fx.Node]]) -> None:
    """Views go to their first reader."""
    output = program.graph.output_node()
    placed: set[fx.Node] = set()

    def put(node: fx.Node) -> None:
        for source in (*node.all_input_nodes, node):
            if source.op == "call_function" and source not in placed:
                placed.add(source)
                if source is not node:
                    put(source)
                output.prepend(source)

    for place, i in enumerate([*text.inside, None]):
        for node in between.get(place, ()):
            put(node)
        if i is not None:
            put(text.operations[i])
    for node in output.all_input_nodes:
        put(node)
