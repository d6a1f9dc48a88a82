"""What a graph makes of its rows becomes that of the global batch: its loss, and other sums and means.

The totals behind them are added up over ranks, and what follows from them is computed on the sum. On its
way back a loss's gradient is that of the mean over ranks of what each of them does with the loss, which is
what ``reduce_grad`` averages: so the totals' gradients are added up over ranks, too.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from stepgraph.analysis.sums import Sums
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.collectives import redistribute
from stepgraph.program.layout import MeshShape
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.program.record import SUMMATION, Results, Values, program_pass
from stepgraph.program.shards import REDUCTIONS

aten = torch.ops.aten


def _expected(
    values: Values, before: Program, after: Program, mesh: MeshShape, sums: Sums
) -> Results:
    """Readers of totals read what all ranks have together, those of a tangent its mean."""
    loss, found = sums.loss or (None, None)
    kinds = dict(sums.totals) | (found.totals if found else {})
    tangent = None if loss is None else roles.ResultTangent(loss.index)
    _, seen = values.inside(before, {*kinds, *([roles.label(tangent)] if tangent else [])})

    def of_all(name: str, kind: str) -> torch.Tensor:
        return REDUCTIONS[kind](torch.stack(values.on_all_ranks(seen[name])))

    whole = {name: of_all(name, kind) for name, kind in kinds.items()}
    tail = {*sums.tail, *(found.tail if found else ())}
    scaled = found.boundary if found and found.gradient_kind == "sum" else None
    inputs: dict[Any, torch.Tensor] = {}
    if found is not None and tangent is not None:
        kind = "avg" if scaled else found.gradient_kind
        inputs[tangent] = of_all(roles.label(tangent), kind)

    def read(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = []
        for source, value in zip(node.args, args, strict=True):
            name = meta(source).get("name") if isinstance(source, fx.Node) else None
            if name in whole and meta(node)["name"] in tail:
                value = whole[name]
            if name is not None and name == scaled and meta(node)["name"] not in tail:
                value = value * mesh.world_size
            given.append(value)
        return node.target(*given, **kwargs)  # type: ignore[operator]

    special = {*whole, scaled}
    readers = [
        meta(node)["name"]
        for node in before.operations()
        if any(meta(source).get("name") in special for source in node.all_input_nodes)
    ]
    results = dict(values.execute(before, dict.fromkeys(readers, read), inputs))
    for role, node, _ in before.output_rows:
        if meta(node).get("name") in sums.totals:
            results[role] = whole[meta(node)["name"]]
    return results


@program_pass(
    reads="results, and the tangent of the loss",
    writes="``all_reduce`` of totals and of the tangent; one factor on the way back",
    preserves=SUMMATION,
    reference=_expected,
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
    return program.finish()


class _Sum:
    def __init__(self, program: Program, mesh: MeshShape) -> None:
        self.program = program
        ((self.mesh_dim, self.ranks),) = mesh.dims
        nodes = [*program.placeholders, *program.operations()]
        self.nodes = {meta(node)["name"]: node for node in nodes}
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
            others = {u for u in total.users if meta(u).get("name", u.op) not in readers}
            point = self.first if total.op == "placeholder" else total.next
            emit = Builder(self.program, FORWARD, point)
            _replace(total, self._sum(emit, total, kind), others)

    def _sum(self, emit: Builder, node: fx.Node, kind: str) -> fx.Node:
        return redistribute(emit, node, Partial(kind), Replicate(), self.mesh_dim, self.ranks, 0)


def _replace(node: fx.Node, new: fx.Node, but_for: set[fx.Node]) -> None:
    made = [new]  # and what was emitted between a value and the one that replaces it
    for emitted in made:  # grows
        made += [n for n in emitted.all_input_nodes if n is not node and n not in made]
    for user in list(node.users):
        if user not in made and user not in but_for:
            user.replace_input_with(node, new)
