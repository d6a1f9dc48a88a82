"""The program of the last micro-batch."""

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph.capture.accumulators import accumulate, node_named, replace_boundary_by_one
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, OPTIMIZER, Program
from stepgraph.program.record import SUMMATION, Results, Values, program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


def _expected(
    values: Values,
    before: Program,
    after: Program,
    normalisation: Normalisation | None,
    micro_batches: int,
) -> Results | None:
    """The whole batch at once, in plain PyTorch; or the mean over micro-batches."""
    if normalisation is None:
        return values.execute(before)
    if roles.Seed() in after.inputs:
        return None  # plain PyTorch draws other numbers
    values.accumulate()
    return values.whole_batch(normalisation.exact)


@program_pass(
    reads="``Grad`` and ``Loss`` outputs",
    writes="inputs ``Accumulator``; the loss's tail, moved behind the last sum",
    preserves=SUMMATION,
    reference=_expected,
)
def finish_accumulation(
    program: Program, normalisation: Normalisation | None, micro_batches: int
) -> Program:
    """Adds the last micro-batch and turns totals into the loss and gradients of the whole batch.

    Args:
        normalisation: of the loss; None: there is one batch, and nothing to finish.
        micro_batches: a mean over each becomes the mean over all.
    """
    if normalisation is None:
        return program
    boundary = node_named(program, normalisation.boundary)
    if boundary is not None:
        replace_boundary_by_one(program, boundary, normalisation)
    sums = accumulate(program, normalisation)
    emit = Builder(program, BACKWARD)
    by_name = {meta(node).get("name"): node for node in program.operations()}
    totals: dict[fx.Node, fx.Node] = {}
    for name, kind in normalisation.totals.items():
        total = sums[f"total:{name}"]
        if kind == "avg":
            total = emit(aten.div.Scalar, total, micro_batches)
        totals[by_name[name]] = total
    tail = _move_tail(program, normalisation, totals)
    loss = program.result(roles.Loss())
    loss = totals.get(loss, tail.get(loss, loss))
    factor = tail.get(boundary) if boundary is not None else None
    averaged = normalisation.gradient_kind == "avg"
    emit = Builder(program, OPTIMIZER)
    results = []
    for role, node, _ in program.output_rows:
        if isinstance(role, roles.Grad):
            total = sums[f"grad:{role.name}"]
            if factor is not None:
                dtype = meta(total)["val"].dtype
                same = meta(factor)["val"].dtype == dtype
                scale = factor if same else emit(private.TO_COPY, factor, dtype=dtype)
                total = emit(aten.mul.Tensor, total, scale)
            node = emit(aten.div.Scalar, total, micro_batches) if averaged else total
        results.append(loss if isinstance(role, roles.Loss) else node)
    program.graph.output_node().args = (tuple(results),)
    return program.finish()


def _move_tail(
    program: Program, normalisation: Normalisation, totals: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copies the tail behind the totals, in order, reading them; returns old -> new."""
    emit = Builder(program, BACKWARD)
    moved: dict[fx.Node, fx.Node] = dict(totals)
    tail = [node for node in program.operations() if meta(node).get("name") in normalisation.tail]
    for node in tail:
        emit.module = meta(node)["module"]
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: moved.get(a, a))
        moved[node] = emit(node.target, *args, **kwargs)
    return moved
