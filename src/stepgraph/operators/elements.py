"""Operators that go element by element: arithmetic, casts, copies, draws."""

import torch

from stepgraph import torch_internals
from stepgraph.operators.record import LOOP, Facts, overloads
from stepgraph.program.randomness import RANDOM
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten

FACTS: tuple[Facts, ...] = (
    (
        overloads(
            aten.exp, aten.log, aten.sigmoid, aten.silu, aten.softplus, aten.log1p, aten.expm1,
            aten.silu_backward,
        ),
        {"cost": "exp"},
    ),
    (overloads(aten.tanh, aten.erf), {"cost": "tanh"}),
    (overloads(aten.gelu), {"cost": "gelu"}),
    (overloads(aten.gelu_backward), {"cost": "gelu_backward"}),
    (overloads(aten.sin, aten.cos), {"cost": "trigonometric"}),
    (overloads(aten.sqrt, aten.rsqrt), {"cost": "root"}),
    (overloads(private.to_copy, aten.where, aten.lt), {"cost": "conversion"}),
    (overloads(aten.native_dropout_backward), {"cost": "masking"}),
    ((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar), {"power": True}),
    ((aten.clone.default, private.TO_COPY), {"elementwise": True, "copies": True}),
    ((private.TO_COPY, torch_internals.mutable_copy), {"fusing": LOOP}),
    ((aten.native_dropout.default, aten.native_dropout_backward.default), {"fusing": LOOP}),
    ((RANDOM,), {"fusing": LOOP, "cost": "random"}),
)  # fmt: skip
