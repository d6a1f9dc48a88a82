"""A Program in pieces that are compiled apart: what repeats is one body, called with its own tensors.

Whatever was decided stays as it is: a piece is a stretch of the order in which the Program runs, and pieces
run one after the other. What is handed on are tensors that were allocated (or are inputs): a view is taken
anew by each piece that reads it, so that no piece is given one memory twice. What stands beside the layers
is called between them as it is.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph import torch_internals
from stepgraph.lowering.handed_on import computed_anew, floats, memory, root_of
from stepgraph.lowering.repeats import VARYING, Piece, Reader, find_pieces
from stepgraph.operators.views import viewed
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM, offset_of
from stepgraph.torch_internals.code import graph_module

aten = torch.ops.aten

_WORTH = 0.2  # of the operations: where fewer than that need not be compiled, the whole is


# Their results are memory of their own in every lowering: of a product with ones inductor makes its factor.
OWN_MEMORY = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.embedding_dense_backward.default
}  # fmt: skip
_SENT = {aten.cat.default, *OWN_MEMORY}


class IndivisibleError(Exception):
    """What is handed on from piece to piece is no tensor."""


@dataclass(frozen=True)
class Number:
    """An argument of a body that is a constant of one call, as a tensor of so many dimensions.

    ``of``: what it is; equal numbers of two things are two arguments, as they are not equal in every call.
    """

    of: str
    value: int
    dims: int


Given = fx.Node | Number


@dataclass
class Call:
    """One piece: its body, what that is given, and which of its results are handed on (None: dropped)."""

    body: "Body"
    given: list[Given]
    made: list[fx.Node | None] = field(default_factory=list)


@dataclass
class Body:
    """What several pieces compute: a graph of tensors that may write into what it is given.

    ``plain``: it is run operator by operator; ``results``: places among its nodes.
    """

    root: fx.GraphModule
    graph: fx.Graph
    plain: bool = False
    results: set[int] = field(default_factory=set)

    def finish(self) -> None:
        """Returns what any of its calls hands on."""
        nodes = list(self.graph.nodes)
        self.graph.output(tuple(nodes[place] for place in sorted(self.results)))

    def module(self) -> fx.GraphModule:
        """Its graph as a module."""
        return graph_module(self.root, self.graph)


@dataclass
class Pieces:
    """A Program as calls, in order.

    ``piece_of``: by which call each operation is computed that is no view; ``needed``: which is the last
    to need a value; ``anew``: which pieces compute values of others themselves.
    """

    program: Program
    calls: list[Call]
    piece_of: dict[fx.Node, int]
    needed: dict[fx.Node, int]
    anew: set[tuple[int, fx.Node]] = field(default_factory=set)

    @property
    def bodies(self) -> list[Body]:
        """Each once."""
        return list({id(call.body): call.body for call in self.calls}.values())


def in_pieces(program: Program) -> Pieces | None:
    """A Program in pieces; None: too little of it repeats.

    Args:
        program: as it is executed.
    """
    text = Reader(program).text()
    operations = text.operations
    if not text.layers:
        return None
    holder: dict[fx.Node, Piece] = {}
    for piece in find_pieces(text):
        for node in operations[piece.start : piece.stop]:
            source = node.args[0] if node.target is operator.getitem else None
            holder[node] = holder[source] if isinstance(source, fx.Node) else piece
    members: dict[Piece, list[fx.Node]] = {}
    for node in operations:
        members.setdefault(holder[node], []).append(node)
    # Of one operation the compiler makes what there is already, and takes a second for it.
    members = {
        replace(piece, plain=True) if len(nodes) == 1 else piece: nodes
        for piece, nodes in members.items()
    }
    holder = {node: piece for piece, nodes in members.items() for node in nodes}
    number = {piece: i for i, piece in enumerate(members)}
    piece_of = {node: number[holder[node]] for node in operations}
    anew = computed_anew(operations, piece_of, {number[piece] for piece in members if piece.plain})
    try:
        copies = [
            _Copy(program, piece_of, anew, number[piece], piece.plain, nodes)
            for piece, nodes in members.items()
        ]
    except IndivisibleError:
        return None
    by_rows = any("rows_piece" in meta(node) for node in operations)
    found = _joined(program, copies, piece_of, least=0 if by_rows else _WORTH)
    return found and replace(found, anew=anew)


class _Copy:
    """The graph of one piece."""

    def __init__(
        self,
        program: Program,
        piece_of: dict[fx.Node, int],
        anew: set[tuple[int, fx.Node]],
        number: int,
        plain: bool,
        nodes: list[fx.Node],
    ) -> None:
        self.program, self.piece_of, self.anew = program, piece_of, anew
        self.number, self.plain = number, plain
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.given: dict[Given, fx.Node] = {}
        self.text: list[str] = []
        # Inputs first, as fx wants them: they are put here, in the order in which they are met.
        self.start = self.graph.call_function(len, ((),))
        for node in nodes:
            self.compute(node)
        self.graph.erase_node(self.start)
        self.place = {node: i for i, node in enumerate(self.graph.nodes)}

    def get(self, node: fx.Node) -> fx.Node:
        """A value of the Program, within this piece."""
        if node in self.new:
            return self.new[node]
        if floats(node):
            shown = self.is_part(node)
            return self.take(node, meta(node)["val"]) if shown else self.compute(node)
        if (self.number, node) in self.anew:
            return self.compute(node)
        value = meta(node).get("val")
        if node.op == "get_attr" and not isinstance(value, torch.Tensor):
            attribute = operator.attrgetter(str(node.target))(self.program.module)
            copy = self.new[node] = self.graph.node_copy(node)
            self.text.append(f"{node.target} {getattr(attribute, 'code', '')}")
            return copy
        held = memory(node, self.piece_of)
        if held is not node:
            return self.get(held)
        if not isinstance(value, torch.Tensor):
            raise IndivisibleError
        return self.take(node, value)

    def is_part(self, node: fx.Node) -> bool:
        """Whether a view is a part of what another piece made, at a place of its own: of a bucket.

        It is shown to the body, for one to serve all parts; nobody writes into what is no input.
        """
        parts = False
        while floats(node):
            parts |= node.target is aten.slice.Tensor
            node = viewed(node)  # type: ignore[assignment]
        return parts and node in self.piece_of and self.piece_of[node] != self.number

    def take(self, given: Given, example: Any) -> fx.Node:
        """One more input."""
        if given not in self.given:
            with self.graph.inserting_before(self.start):
                new = self.given[given] = self.graph.placeholder(f"input_{len(self.given)}")
            set_meta(new, {"val": example})
            if isinstance(given, fx.Node):
                self.new[given] = new
            shape = f"{[*example.shape]} {[*example.stride()]}"
            self.text.append(f"{new} {example.dtype} {example.device} {shape}")
        return self.given[given]

    def compute(self, node: fx.Node) -> fx.Node:
        """One operation, and the views that it reads."""
        args, kwargs = map_arg((node.args, node.kwargs), self.get)
        if node.target in VARYING:
            args = self.lifted(node, list(args))
        target = node.target
        if self.plain and target is torch_internals.ALL_REDUCE and _is_read_by(node):
            target = torch_internals.ALL_REDUCE_INTO  # as inductor does
        new = self.new[node] = self.graph.create_node(
            "call_function", target, tuple(args), dict(kwargs)
        )
        set_meta(new, meta(node))
        self.text.append(f"{new} {target} {new.args} {new.kwargs}")
        return new

    def lifted(self, node: fx.Node, args: list[Any]) -> list[Any]:
        """What tells a random operation from others becomes an input, for one body to serve all."""
        if node.target is RANDOM:
            _, _, operation, _, whole, starts, *_ = args
            numbers = {"operation": operation, f"start in {whole}": offset_of(whole, starts)}
            args[2], args[5] = 0, [0] * len(starts)
            return self.beside(node, args, 0, numbers)
        number, args[9] = args[9], 0
        return self.beside(node, args, 8, {"operation": number})

    def beside(
        self, node: fx.Node, args: list[Any], seed: int, numbers: dict[str, int]
    ) -> list[Any]:
        """Words of a seed followed by numbers, or a single one that a number is added to."""
        words = meta(args[seed])["val"]
        one = words.new_empty([1] * words.dim())
        given = [Number(of, value, words.dim()) for of, value in numbers.items()]
        taken = [self.take(number, one) for number in given]
        if words.dim():
            added = self.graph.call_function(aten.cat.default, ([args[seed], *taken],))
            shape = [words.shape[0] + len(numbers)]
        else:
            added = self.graph.call_function(aten.add.Tensor, (args[seed], *taken))
            shape = []
        set_meta(added, {**meta(node), "val": words.new_empty(shape)})
        self.text.append(f"{added} {added.target} {added.args}")
        args[seed] = added
        return args


def _is_read_by(node: fx.Node) -> bool:
    """Whether what an operation reads was made for it alone, and lies in memory as it is indexed."""
    value = node.all_input_nodes[0]
    source = root_of(value)
    one: fx.Node | None = source
    while one is not node and one is not None:  # whoever else shows it might read it
        one = next(iter(one.users)) if len(one.users) == 1 else None
    # inductor leaves out a cat of one value: what it would have copied may be another's
    left_out = source.target is aten.cat.default and len(source.args[0]) == 1  # type: ignore[arg-type]
    made = source.target in _SENT and not left_out
    return made and one is node and meta(value)["val"].is_contiguous()


def _joined(
    program: Program, copies: list[_Copy], piece_of: dict[fx.Node, int], least: float
) -> Pieces | None:
    """Of all operations so many (a part of 1) at least need not be compiled; or None."""
    bodies: dict[tuple[bool, str], Body] = {}
    calls = []
    for copy in copies:
        body = Body(program.module, copy.graph, copy.plain)
        calls.append(
            Call(bodies.setdefault((copy.plain, "\n".join(copy.text)), body), list(copy.given))
        )
    compiled = [body for body in bodies.values() if not body.plain]
    all_of_them = sum(_operations(call.body) for call in calls)
    if sum(map(_operations, compiled)) > (1 - least) * all_of_them:
        return None
    needed: dict[fx.Node, int] = {}
    for number, call in enumerate(calls):
        nodes = [node for node in call.given if isinstance(node, fx.Node)]
        needed |= {memory(root_of(node), piece_of): number for node in nodes}
    results = program.results
    needed |= {memory(root_of(node), piece_of): len(calls) for node in results}
    _keep_what_is_sent(copies, piece_of, needed)
    handed: list[dict[int, fx.Node]] = [{} for _ in calls]
    for node in needed:
        if node in piece_of:
            copy = copies[piece_of[node]]
            handed[copy.number][copy.place[copy.new[node]]] = node
    for call, made in zip(calls, handed, strict=True):
        call.body.results |= made.keys()
    for call, made in zip(calls, handed, strict=True):
        call.made = [made.get(place) for place in sorted(call.body.results)]
    for body in bodies.values():
        body.finish()
    return Pieces(program, calls, piece_of, needed)


def _operations(body: Body) -> int:
    return sum(node.op == "call_function" and not floats(node) for node in body.graph.nodes)


def _keep_what_is_sent(
    copies: Sequence[_Copy], piece_of: dict[fx.Node, int], needed: dict[fx.Node, int]
) -> None:
    """What a collective reads must not be used again before the wait, which may be another piece's.

    An all-reduce sends a copy, its result.
    """
    for copy in copies:
        for node in filter(is_collective, list(copy.new)):
            if piece_of.get(node) != copy.number or node.target is torch_internals.ALL_REDUCE:
                continue
            last = max((piece_of.get(user, len(copies)) for user in node.users), default=0)
            if last <= copy.number:
                continue
            for source in map(root_of, node.all_input_nodes):
                needed[source] = max(needed.get(source, 0), last)
