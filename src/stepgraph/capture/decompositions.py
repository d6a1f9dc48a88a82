"""Which operators are captured through simpler ones.

Losses are taken apart so that a Program shows how they are normalised: ``nll_loss_forward(mean)`` on
a sharded batch would be a mean of means, its parts are a sum and a count. So is every operator that
no sharding rule knows but torch can express through simpler ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.capture.masked_writes import MASKED_WRITES
from stepgraph.operators.every_way import has_every_way
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

LOSSES = (
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
)

# Taken apart they lose a fast kernel, or become in-place or strided code that no rule understands.
KEPT_WHOLE = {
    aten.lift_fresh_copy.default,
    aten.arange.default,
    aten.arange.start_step,
    aten.full.default,
    private.TO_COPY,
    aten.embedding_dense_backward.default,
    aten.native_group_norm_backward.default,
}


@functools.cache
def decomposition_table() -> dict[Any, Callable]:
    """Operators taken apart at capture, with torch's own decompositions."""
    table = {
        op: function
        for op, function in torch_internals.decomposable_operators().items()
        if hasattr(op, "_schema")
        and op not in KEPT_WHOLE
        and not (torch_internals.has_sharding_rule(op) or has_every_way(op))
        and torch.Tag.nondeterministic_seeded not in op.tags
    }
    for op in LOSSES:
        if function := torch_internals.decomposition(op):
            table[op] = function
    return table | MASKED_WRITES
