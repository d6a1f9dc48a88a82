"""Operations that stand for a sharded parameter in code that is captured piece by piece.

Such code is traced with full shapes and this rank's rows. A parameter enters it as
``unshard(local part)``, and the backward of that is ``reduce_grad``. Inside a captured graph
:func:`stepgraph.placement.passes.place_markers.place_markers` turns both into collectives that the other
passes know; outside, they run as they stand here.
"""

from collections.abc import Sequence

import torch

from stepgraph import torch_internals
from stepgraph.program.layout import chunk_size


@torch.library.custom_op("stepgraph::unshard", mutates_args=())
def unshard(
    part: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    in_parts: bool,
    ranks: int,
    group: str,
    mesh_dim: str,
) -> torch.Tensor:
    """The whole of a parameter, in the type that the model computes in.

    Its gradient is reduced: the mean over the ranks of what each of them has.

    Args:
        part: this rank's rows (dimension 0), without padding; or, not ``in_parts``, the whole.
        shape: of the whole.
        dtype: of the result.
        reduce_dtype: in which gradients are added up.
        in_parts: each rank has rows of it. (A shape does not tell: the one row of ``[1, n]`` is the whole.)
        ranks: along the mesh dimension.
        group: the process group's name; empty for one rank.
        mesh_dim: the dimension's name.

    Returns:
        a new tensor of shape ``shape``.
    """
    part = part.to(dtype)
    if ranks == 1 or not in_parts:
        return part.reshape(list(shape)).clone()
    rows = chunk_size(shape[0], ranks)
    padded = part.new_zeros([rows, *shape[1:]])
    padded[: part.shape[0]] = part
    whole = torch_internals.gather_over_group(padded, ranks, group)
    return whole[: shape[0]].clone()


@unshard.register_fake
def _(part, shape, dtype, reduce_dtype, in_parts, ranks, group, mesh_dim):
    return part.new_empty(list(shape), dtype=dtype)


@torch.library.custom_op("stepgraph::reduce_grad", mutates_args=())
def reduce_grad(
    gradient: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    in_parts: bool,
    ranks: int,
    group: str,
    mesh_dim: str,
) -> torch.Tensor:
    """The mean over ranks of a whole gradient: this rank's rows of it, or all.

    Args:
        gradient: of the whole parameter, as this rank's rows of the batch have it.
        shape: of what this rank keeps of the parameter.
        dtype: of the result: the parameter's.
        reduce_dtype, in_parts, ranks, group, mesh_dim: as for :func:`unshard`.
    """
    if ranks == 1:
        return gradient.to(dtype, copy=True).reshape(list(shape))
    total = gradient.to(reduce_dtype)
    if not in_parts:
        return (torch_internals.sum_over_group(total.contiguous(), group) / ranks).to(dtype)
    rows = chunk_size(gradient.shape[0], ranks)
    padded = total.new_zeros([rows * ranks, *gradient.shape[1:]])
    padded[: gradient.shape[0]] = total
    mine = torch_internals.scatter_sum_over_group(padded, ranks, group)
    return (mine[: shape[0]] / ranks).to(dtype)


@reduce_grad.register_fake
def _(gradient, shape, dtype, reduce_dtype, in_parts, ranks, group, mesh_dim):
    return gradient.new_empty(list(shape), dtype=dtype)


def _remember(ctx, inputs, output) -> None:
    part, _, _, *how = inputs
    ctx.arguments = (list(part.shape), part.dtype, *how)


def _reduce(ctx, gradient: torch.Tensor):
    return REDUCE_GRAD(gradient, *ctx.arguments), *[None] * 7


unshard.register_autograd(_reduce, setup_context=_remember)

UNSHARD = torch.ops.stepgraph.unshard.default
REDUCE_GRAD = torch.ops.stepgraph.reduce_grad.default
