"""Operators of ATen with private names, under public ones.

Each was used on torch 2.11.0, 2.13.0 and 2.15.0. A name that a torch does not have stands for nothing
(:class:`Absent`): no graph of that torch can hold it.
"""

from dataclasses import dataclass
from typing import Any

import torch

# torch version: how far the names below were tried there (``docs/releases.md``).
SEEN = {"2.11.0": "tried", "2.13.0": "tried", "2.15.0": "tried"}


@dataclass(frozen=True)
class Absent:
    """An operator that the running torch does not have; equal to no operator of a graph."""

    name: str

    @staticmethod
    def overloads() -> list[str]:
        """None: nothing has this name."""
        return []


def _find(name: str) -> Any:
    """The operator or packet ``name`` of ATen, or :class:`Absent`."""
    found: Any = torch.ops.aten
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return Absent(name)
    return found


TO_COPY = _find("_to_copy.default")
LOG_SOFTMAX = _find("_log_softmax.default")
LOG_SOFTMAX_BACKWARD = _find("_log_softmax_backward_data.default")
SOFTMAX = _find("_softmax.default")
SOFTMAX_BACKWARD = _find("_softmax_backward_data.default")
FUSED_ADAM, FUSED_ADAMW = _find("_fused_adam_.default"), _find("_fused_adamw_.default")
FUSED_RMS_NORM = _find("_fused_rms_norm.default")
FUSED_RMS_NORM_BACKWARD = _find("_fused_rms_norm_backward.default")
CPU_ATTENTION = _find("_scaled_dot_product_flash_attention_for_cpu.default")
CPU_ATTENTION_BACKWARD = _find("_scaled_dot_product_flash_attention_for_cpu_backward.default")
EFFICIENT_ATTENTION = _find("_scaled_dot_product_efficient_attention.default")
EFFICIENT_ATTENTION_BACKWARD = _find("_scaled_dot_product_efficient_attention_backward.default")
FLASH_ATTENTION = _find("_scaled_dot_product_flash_attention.default")
FLASH_ATTENTION_BACKWARD = _find("_scaled_dot_product_flash_attention_backward.default")
CUDNN_ATTENTION_BACKWARD = _find("_scaled_dot_product_cudnn_attention_backward.default")
BATCH_NORM_FUNCTIONAL = _find("_native_batch_norm_legit_functional.default")
BATCH_NORM_FROZEN = _find("_native_batch_norm_legit_no_training.default")
BATCH_NORM_WITHOUT_BUFFERS = _find("_native_batch_norm_legit.no_stats")
ADAPTIVE_AVERAGE_POOL = _find("_adaptive_avg_pool2d.default")
ADAPTIVE_AVERAGE_POOL_BACKWARD = _find("_adaptive_avg_pool2d_backward.default")
BATCH_NORM_WITH_RESERVE = _find("_batch_norm_with_update_functional.default")

# All overloads of one of them, under the same name in small letters.
to_copy = _find("_to_copy")
softmax = _find("_softmax")
safe_softmax = _find("_safe_softmax")
log_softmax = _find("_log_softmax")
softmax_backward = _find("_softmax_backward_data")
log_softmax_backward = _find("_log_softmax_backward_data")
fused_rms_norm = _find("_fused_rms_norm")
batch_norm = _find("_native_batch_norm_legit")
batch_norm_functional = _find("_native_batch_norm_legit_functional")
adaptive_average_pool = _find("_adaptive_avg_pool2d")
eigh, svd, eigvals = _find("_linalg_eigh"), _find("_linalg_svd"), _find("_linalg_eigvals")
pack_padded_sequence = _find("_pack_padded_sequence")
ctc_loss, cudnn_ctc_loss = _find("_ctc_loss"), _find("_cudnn_ctc_loss")
