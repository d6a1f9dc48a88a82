"""Spells out log-softmax."""

import torch
from torch import fx

from stepgraph.program.build import Builder
from stepgraph.program.layout import MeshShape
from stepgraph.program.mesh_roles import Role
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@program_pass(
    reads="``_log_softmax`` and its backward",
    writes="elementwise operations and reductions over classes in their place",
    preserves=SUMMATION,
)
def spell_out_log_softmax(program: Program, mesh: MeshShape) -> Program:
    """Log-softmax and its backward as maxima, sums and differences, which sharded classes allow."""
    if Role.TENSOR not in mesh.roles:
        return program
    for node in list(program.operations()):
        if node.target not in (private.LOG_SOFTMAX, private.LOG_SOFTMAX_BACKWARD):
            continue
        emit = Builder(program, meta(node)["phase"], node)
        emit.module = meta(node)["module"]
        node.replace_all_uses_with(_SPELLED[node.target](emit, node))
    return program.finish()


def _log_softmax(emit: Builder, node: fx.Node) -> fx.Node:
    x, dim, _ = node.args
    x = emit.cast(x, torch.promote_types(torch.float32, meta(x)["val"].dtype))  # type: ignore[union-attr]
    shifted = emit(aten.sub.Tensor, x, emit(aten.amax.default, x, [dim], True))
    total = emit(aten.sum.dim_IntList, emit(aten.exp.default, shifted), [dim], True)
    result = emit(aten.sub.Tensor, shifted, emit(aten.log.default, total))
    return emit.cast(result, meta(node)["val"].dtype)


def _log_softmax_backward(emit: Builder, node: fx.Node) -> fx.Node:
    gradient, result, dim, dtype = node.args
    total = emit(aten.sum.dim_IntList, gradient, [dim], True)
    share = emit(aten.mul.Tensor, emit(aten.exp.default, result), total)
    return emit.cast(emit(aten.sub.Tensor, gradient, share), dtype)  # type: ignore[arg-type]


_SPELLED = {private.LOG_SOFTMAX: _log_softmax, private.LOG_SOFTMAX_BACKWARD: _log_softmax_backward}
