"""Operators that make values of numbers alone."""

import torch

from stepgraph.operators.record import CONSTANT, Facts

aten = torch.ops.aten

FACTS: tuple[Facts, ...] = (
    (
        (
            aten.full.default, aten.full_like.default, aten.zeros.default, aten.ones.default,
            aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default,
            aten.new_full.default, aten.scalar_tensor.default, aten.new_ones.default,
            aten.arange.start_step, aten.arange.default, aten.arange.start,
            aten.empty.memory_format, aten.lift_fresh_copy.default,
        ),
        {"fusing": CONSTANT},
    ),
    (
        (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format),
        {"shape_argument": 0},
    ),
    ((aten.zeros_like.default,), {"elementwise": True}),
)  # fmt: skip
