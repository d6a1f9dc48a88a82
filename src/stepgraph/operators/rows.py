"""Operators over the rows of a value: softmax, norms, sums, pooling."""

import torch

from stepgraph.operators.record import ROWS, Facts, overloads
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

FACTS: tuple[Facts, ...] = (
    (
        (
            aten.native_layer_norm.default, private.SOFTMAX, private.LOG_SOFTMAX,
            private.SOFTMAX_BACKWARD, private.LOG_SOFTMAX_BACKWARD, private.FUSED_RMS_NORM,
        ),
        {"fusing": ROWS},
    ),
    (overloads(private.softmax), {"cost": "softmax"}),
    (overloads(private.safe_softmax), {"cost": "safe_softmax"}),
    (overloads(private.log_softmax), {"cost": "log_softmax"}),
    (
        overloads(private.softmax_backward, private.log_softmax_backward),
        {"cost": "softmax_backward"},
    ),
    (
        overloads(aten.sum, aten.mean, aten.amax, aten.var_mean, aten.linalg_vector_norm),
        {"cost": "reduction"},
    ),
    (
        overloads(
            aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
            aten.native_group_norm_backward, private.fused_rms_norm,
        ),
        {"cost": "layer_norm"},
    ),
    (
        overloads(
            aten.native_batch_norm, private.batch_norm, private.batch_norm_functional,
        ),
        {"cost": "batch_norm"},
    ),
    (overloads(aten.native_batch_norm_backward), {"cost": "batch_norm_backward"}),
    (
        overloads(
            aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward,
            private.adaptive_average_pool,
        ),
        {"cost": "pooling"},
    ),
)  # fmt: skip
