"""Clips gradients by their global norm."""

import torch
from torch import fx

from stepgraph.capture.update import MAX_GRAD_NORM
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program
from stepgraph.program.record import SUMMATION, Results, Values, program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm it divides by


def _expected(values: Values, before: Program, after: Program, clip: bool) -> Results:
    """As ``torch.nn.utils.clip_grad_norm_`` leaves gradients."""
    results = values.execute(before)
    gradients = {role: v for role, v in results.items() if isinstance(role, roles.Grad)}
    return {**results, **values.clipped(gradients)} if clip else results


@program_pass(
    reads="``Grad`` outputs",
    writes="optimizer operations; the input ``Scalar(max_grad_norm)``",
    preserves=SUMMATION,
    reference=_expected,
)
def clip_gradients(program: Program, clip: bool) -> Program:
    """Scales all gradients so that their global 2-norm is at most the input ``max_grad_norm``.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``; the squares are summed so that sharded
    gradients cost one reduction of one number.
    """
    if not clip:
        return program
    emit = Builder(program, OPTIMIZER)
    gradients = program.gradients
    device = meta(next(iter(gradients.values())))["val"].device
    limit = emit.input(roles.Scalar(MAX_GRAD_NORM), (), torch.float64, device)
    # 0-dim gradients last: they are whole on every rank, unlike the sums before them.
    total = None
    for gradient in sorted(gradients.values(), key=lambda node: meta(node)["val"].dim() == 0):
        wide = gradient
        if meta(gradient)["val"].dtype.itemsize < 4:
            wide = emit(private.TO_COPY, gradient, dtype=torch.float32)
        squares = emit(aten.sum.default, emit(aten.mul.Tensor, wide, wide))
        # Padding of an uneven shard is zero, and so is its square: it may be summed.
        meta(squares)["padding_is_zero"] = True
        total = squares if total is None else emit(aten.add.Tensor, total, squares)
    assert total is not None
    norm = emit(aten.sqrt.default, total)
    wanted = emit(aten.div.Tensor, limit, emit(aten.add.Scalar, norm, _TINY))
    coefficient = emit(aten.clamp.default, wanted, None, 1.0)
    results = list(program.results)
    factors: dict[torch.dtype, fx.Node] = {}
    for name, gradient in gradients.items():
        dtype = meta(gradient)["val"].dtype  # as the factor's, or a 0-dim gradient is promoted
        if dtype not in factors:
            factors[dtype] = emit(private.TO_COPY, coefficient, dtype=dtype)
        clipped = emit(aten.mul.Tensor, gradient, factors[dtype])
        results[program.outputs.index(roles.Grad(name))] = clipped
    program.graph.output_node().args = (tuple(results),)
    return program.finish()
