"""A loss that one graph of many makes from its rows becomes that of the global batch.

Ranks are to a graph what micro-batches are to a step: the totals behind the loss (a mean over elements,
a sum and its count) are added up over ranks, and what follows from them is computed on the sum. On its way
back a gradient is that of the mean over ranks of what each of them does with the loss, which is what
``reduce_grad`` averages: so the totals' gradients are added up over ranks, too.

In a graph without a backward every result that is a sum, mean, maximum or minimum over rows, of any shape,
becomes that over all ranks' rows.

reads: results that are single numbers, and their tangents. writes: ``all_reduce`` of totals and of the
tangent; one factor on the way back. preserves: all other results, and gradients up to that factor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from stepgraph.placement.normalisation import (
    NUMBERS,
    find_normalisation,
    find_totals,
    is_batched,
)
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.collectives import redistribute
from stepgraph.program.layout import MeshShape
from stepgraph.program.names import name_operations
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.torch_internals import ALL_REDUCE

aten = torch.ops.aten
OWN_LOSS = "loss: the mean over data-parallel ranks of each one's own"
OWN_RESULT = "a result without a gradient is each data-parallel rank's own"


def sum_over_ranks(program: Program, mesh: MeshShape, rows: int) -> Program:
    """Makes the graph's loss, if it has one, the global batch's; see the module docstring."""
    if next(iter(program.operations(BACKWARD)), None) is None:
        return _sum_results(program, mesh, rows)
    candidates = [
        role
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.ModuleResult)
        and node.meta["val"].dim() == 0
        and roles.ResultTangent(role.index) in program.inputs
    ]
    for loss in candidates:
        tangent = roles.ResultTangent(loss.index)
        found = find_normalisation(program, loss, tangent, rows)
        if len(candidates) > 1:
            found.exact, found.reason = False, "a graph makes several losses"
        if found.numbers:  # a graph has no other rows to be held against
            found.exact, found.reason = False, NUMBERS
        if not found.exact:
            program.note(f"{OWN_LOSS}, because {found.reason}")
            continue
        _Sum(program, mesh).apply(found, program.input_node(tangent))
    name_operations(program.graph)
    return program.finish()


def _sum_results(program: Program, mesh: MeshShape, rows: int) -> Program:
    results = [role for role in program.outputs if isinstance(role, roles.ModuleResult)]
    found = find_totals(program, results, rows)
    for reason in found.apart:
        program.note(f"{OWN_RESULT} (of numbers, evaluate has the mean), because {reason}")
    _Sum(program, mesh).add_up(found.kinds, {*found.tail, "output"})
    name_operations(program.graph)
    return program.finish()


def whole_results(program: Program, rows: int) -> list[int]:
    """Which results of a graph are no rows, whatever their shapes: of parameters alone, or added up."""
    reached: set[fx.Node] = set()
    for node, role, value in zip(
        program.placeholders, program.inputs, program.input_values, strict=True
    ):
        if is_batched(role, value, rows):
            reached.add(node)
    for node in program.operations():
        if node.target is not ALL_REDUCE and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return [
        role.index
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.ModuleResult) and node not in reached and node.meta["val"].dim()
    ]


class _Sum:
    def __init__(self, program: Program, mesh: MeshShape) -> None:
        self.program = program
        ((self.mesh_dim, self.ranks),) = mesh.dims
        self.nodes = {node.meta["name"]: node for node in program.operations()}

    def apply(self, found: Normalisation, tangent: fx.Node) -> None:
        """Inserts the sums over ranks."""
        inside = {self.nodes[name] for name in found.tail} | {tangent}
        backward = next(iter(self.program.operations(BACKWARD)))
        self.add_up(found.totals)
        kind = found.gradient_kind
        if found.boundary is not None and kind == "sum":
            boundary, kind = self.nodes[found.boundary], "avg"
            emit = Builder(self.program, BACKWARD, boundary.next)
            self._replace(boundary, emit(aten.mul.Scalar, boundary, self.ranks), inside)
        emit = Builder(self.program, BACKWARD, backward)
        self._replace(tangent, self._sum(emit, tangent, kind), set())

    def add_up(self, totals: Mapping[str, str], readers: Collection[str] | None = None) -> None:
        """Inserts the sums (or what else, by name) of values over ranks, for all readers or some."""
        for name, kind in totals.items():
            total = self.nodes[name]
            others = {
                user
                for user in total.users
                if readers is not None and user.meta.get("name", user.op) not in readers
            }
            emit = Builder(self.program, FORWARD, total.next)
            self._replace(total, self._sum(emit, total, kind), others)

    def _sum(self, emit: Builder, node: fx.Node, kind: str) -> fx.Node:
        return redistribute(emit, node, Partial(kind), Replicate(), self.mesh_dim, self.ranks, 0)

    def _replace(self, node: fx.Node, new: fx.Node, but_for: set[fx.Node]) -> None:
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
