"""What a graph makes of its rows becomes that of the global batch: its loss, and other sums and means.

The totals behind them are added up over ranks, and what follows from them is computed on the sum. On its
way back a loss's gradient is that of the mean over ranks of what each of them does with the loss, which is
what ``reduce_grad`` averages: so the totals' gradients are added up over ranks, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from stepgraph.analysis.sums import Sums
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.collectives import redistribute
from stepgraph.program.layout import MeshShape
from stepgraph.program.names import name_operations
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.program.record import SUMMATION, program_pass

aten = torch.ops.aten


@program_pass(
    reads="results, and the tangent of the loss",
    writes="``all_reduce`` of totals and of the tangent; one factor on the way back",
    preserves=SUMMATION,
)
def sum_over_ranks(program: Program, mesh: MeshShape, sums: Sums) -> Program:
    """Adds up over ranks what was decided on; see the module docstring."""
    summed = _Sum(program, mesh)
    if sums.loss is not None:
        loss, found = sums.loss
        summed.apply(found, program.input_node(roles.ResultTangent(loss.index)))
    summed.add_up(sums.totals, {*sums.tail, "output"})
    for note in sums.notes:
        program.note(note)
    name_operations(program.graph)
    return program.finish()


class _Sum:
    def __init__(self, program: Program, mesh: MeshShape) -> None:
        self.program = program
        ((self.mesh_dim, self.ranks),) = mesh.dims
        nodes = [*program.placeholders, *program.operations()]
        self.nodes = {node.meta["name"]: node for node in nodes}
        self.first = next(program.operations(), program.graph.output_node())

    def apply(self, found: Normalisation, tangent: fx.Node) -> None:
        """Inserts the sums over ranks."""
        inside = {self.nodes[name] for name in found.tail} | {tangent}
        backward = next(iter(self.program.operations(BACKWARD)))
        self.add_up(found.totals, found.tail)
        kind = found.gradient_kind
        if found.boundary is not None and kind == "sum":
            boundary, kind = self.nodes[found.boundary], "avg"
            emit = Builder(self.program, BACKWARD, boundary.next)
            _replace(boundary, emit(aten.mul.Scalar, boundary, self.ranks), inside)
        emit = Builder(self.program, BACKWARD, backward)
        _replace(tangent, self._sum(emit, tangent, kind), set())

    def add_up(self, totals: Mapping[str, str], readers: Collection[str]) -> None:
        """Inserts sums (or what else, by name) over ranks of values, for some who read them."""
        for name, kind in totals.items():
            total = self.nodes[name]
            others = {u for u in total.users if u.meta.get("name", u.op) not in readers}
            point = self.first if total.op == "placeholder" else total.next
            emit = Builder(self.program, FORWARD, point)
            _replace(total, self._sum(emit, total, kind), others)

    def _sum(self, emit: Builder, node: fx.Node, kind: str) -> fx.Node:
        return redistribute(emit, node, Partial(kind), Replicate(), self.mesh_dim, self.ranks, 0)


def _replace(node: fx.Node, new: fx.Node, but_for: set[fx.Node]) -> None:
    made = {new, *_behind(new, node)}
    for user in list(node.users):
        if user not in made and user not in but_for:
            user.replace_input_with(node, new)


def _behind(new: fx.Node, old: fx.Node) -> set[fx.Node]:
    """What was emitted between a value and the one that replaces it."""
    found: set[fx.Node] = set()
    stack = [new]
    while stack:
        node = stack.pop()
        if node is not old and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found
