"""A loss that one graph of many makes from its rows becomes that of the global batch.

Ranks are to a graph what micro-batches are to a step: the totals behind the loss (a mean over elements,
a sum and its count) are added up over ranks, and what follows from them is computed on the sum. On its way
back a gradient is that of the mean over ranks of what each of them does with the loss, which is what
``reduce_grad`` averages: so the totals' gradients are added up over ranks, too.

reads: results that are single numbers, and their tangents. writes: ``all_reduce`` of totals and of the
tangent; one factor on the way back. preserves: all other results, and gradients up to that factor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from stepgraph.placement.normalisation import find_normalisation
from stepgraph.placement.numbers import MAY_COUNT_ROWS, counts_rows
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.collectives import redistribute
from stepgraph.program.layout import MeshShape
from stepgraph.program.names import name_operations
from stepgraph.program.program import BACKWARD, FORWARD, Program

aten = torch.ops.aten
OWN_LOSS = "loss: the mean over data-parallel ranks of each one's own"


def sum_over_ranks(program: Program, mesh: MeshShape, rows: int) -> Program:
    """Makes the graph's loss, if it has one, the global batch's; see the module docstring."""
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
        numbers = [number for literals in found.numbers.values() for number in literals]
        if any(found.gradient_kind == "sum" or counts_rows(number, rows) for number in numbers):
            # a graph has no other rows to be held against
            found.exact, found.reason = False, MAY_COUNT_ROWS
        if not found.exact:
            program.note(f"{OWN_LOSS}, because {found.reason}")
            continue
        _Sum(program, mesh).apply(found, program.input_node(tangent))
    name_operations(program.graph)
    return program.finish()


class _Sum:
    def __init__(self, program: Program, mesh: MeshShape) -> None:
        self.program = program
        ((self.mesh_dim, self.ranks),) = mesh.dims
        self.nodes = {node.meta["name"]: node for node in program.operations()}

    def apply(self, found: Normalisation, tangent: fx.Node) -> None:
        """Inserts the sums over ranks."""
        inside = {self.nodes[name] for name in found.tail} | {tangent}
        backward = next(iter(self.program.operations(BACKWARD)))
        add_up(self.program, self.mesh_dim, self.ranks, found.totals)
        kind = found.gradient_kind
        if found.boundary is not None and kind == "sum":
            boundary, kind = self.nodes[found.boundary], "avg"
            emit = Builder(self.program, BACKWARD, boundary.next)
            _replace(boundary, emit(aten.mul.Scalar, boundary, self.ranks), inside)
        emit = Builder(self.program, BACKWARD, backward)
        added = redistribute(
            emit, tangent, Partial(kind), Replicate(), self.mesh_dim, self.ranks, 0
        )
        _replace(tangent, added, set())


def add_up(
    program: Program,
    mesh_dim: str,
    ranks: int,
    totals: Mapping[str, str],
    readers: Collection[str] | None = None,
) -> None:
    """Inserts the sums (or what else, by name) of values over ranks, for all readers or some."""
    nodes = {node.meta["name"]: node for node in program.operations()}
    for name, kind in totals.items():
        total = nodes[name]
        others = {
            user
            for user in total.users
            if readers is not None and user.meta.get("name", user.op) not in readers
        }
        emit = Builder(program, FORWARD, total.next)
        added = redistribute(emit, total, Partial(kind), Replicate(), mesh_dim, ranks, 0)
        _replace(total, added, others)


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
