"""Operators that pick, place or join parts of values."""

import torch

from stepgraph.operators.record import LOOP, Facts, overloads
from stepgraph.program.collectives import ON_FIRST, SHARD_OF

aten = torch.ops.aten

FACTS: tuple[Facts, ...] = (
    (
        (
            aten.embedding.default, aten.gather.default, aten.index_select.default,
            aten.index.Tensor,
        ),
        {"fusing": LOOP, "looks_up": True},
    ),
    (
        (
            aten.cat.default, aten.stack.default, aten.constant_pad_nd.default,
            aten.slice_backward.default, aten.select_backward.default, aten.slice_scatter.default,
            aten.select_scatter.default, SHARD_OF, ON_FIRST,
            aten.scatter.value,  # one number a row is a comparison, once it is placed
        ),
        {"fusing": LOOP},
    ),
    (overloads(aten.cat, aten.constant_pad_nd), {"cost": "concatenation"}),
)  # fmt: skip
