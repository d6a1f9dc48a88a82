"""Hypothesis: what the analysis accepts passes the capture, and what that refuses was named."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.lowering.graphs.obstacles import find_obstacles, obstacles_within
from tests.graphs.capturing import refusal
from tests.graphs.programs import CUDA, traced

aten = torch.ops.aten
HOST, DEVICE = torch.device("cpu"), torch.device("cuda")


def positive(x):
    return aten.gt.Scalar(x, 0)


# Each takes [4, 4] on the device and gives the same.
FINE = {
    "tanh": aten.tanh.default,
    "product": lambda x: aten.mm.default(x, x),
    "softmax": lambda x: aten._softmax.default(x, -1, False),
    "rows": lambda x: aten.index.Tensor(x, [aten.argmax.default(x, -1)]),
    "put rows": lambda x: aten.index_put.default(x, [aten.argmax.default(x, -1)], x),
    "where": lambda x: aten.where.self(positive(x), x, aten.neg.default(x)),
    "sort": lambda x: aten.sort.default(x)[0],
    "table": lambda x: aten.embedding.default(x, aten.argmax.default(x, -1)),
    "in place": lambda x: aten.copy_.default(aten.clone.default(x), aten.neg.default(x)),
    "norm": lambda x: aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0],
    "kernel without dropout": lambda x: aten._scaled_dot_product_efficient_attention.default(
        *[aten.view.default(x, [1, 1, 4, 4])] * 3, None, True
    )[0].view(4, 4),
    "count": lambda x: aten.add.Tensor(x, aten.sum.default(positive(x))),
}
REFUSED = {
    "number": lambda x: aten.mul.Tensor(x, aten._local_scalar_dense.default(aten.sum.default(x))),
    "positions": lambda x: aten.add.Tensor(x, aten.sum.default(aten.nonzero.default(x))),
    "selected": lambda x: aten.add.Tensor(
        x, aten.sum.default(aten.masked_select.default(x, positive(x)))
    ),
    "different": lambda x: aten.add.Tensor(x, aten.sum.default(aten._unique2.default(x)[0])),
    "mask put": lambda x: aten.index_put.default(x, [positive(x)], aten.sum.default(x)),
    "there and back": lambda x: aten._to_copy.default(
        aten._to_copy.default(x, device=HOST), device=DEVICE
    ),
    "rows of the host": lambda x: aten.index.Tensor(x, [aten.arange.default(4, device=HOST)]),
    "number of the host": lambda x: aten.mul.Tensor(x, aten.full.default([], 2.0, device=HOST)),
    "noise": lambda x: aten.mul.Tensor(x, aten.rand_like.default(x)),
    "choice": lambda x: aten.mul.Tensor(x, aten.multinomial.default(positive(x).float(), 4, True)),
    "dropout in a kernel": lambda x: aten._scaled_dot_product_efficient_attention.default(
        *[aten.view.default(x, [1, 1, 4, 4])] * 3, None, True, 0.5
    )[0].view(4, 4),
    "histogram": lambda x: aten.add.Tensor(x, aten.histc.default(x, 4)),
    "most frequent": lambda x: aten.add.Tensor(x, aten.mode.default(x)[0]),
    "eigenvalues": lambda x: aten.add.Tensor(x, aten._linalg_eigh.default(x)[0]),
}  # fmt: skip
STEPS = FINE | REFUSED


def chained(names):
    def function(x):
        for name in names:
            x = STEPS[name](x)
        return x

    return traced(function, (4, 4))


def test_each_step_is_refused_or_not_by_both():
    for name in STEPS:
        program = chained([name])
        found, refused = find_obstacles(program, CUDA), refusal(program)
        assert bool(found) == bool(refused) == (name in REFUSED), (name, found, refused)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(FINE) * 2 + sorted(REFUSED)), min_size=1, max_size=5))
def test_what_is_accepted_passes_and_what_is_refused_was_named(names):
    program = chained(names)
    within, refused = obstacles_within(program, CUDA), refusal(program)
    assert bool(find_obstacles(program, CUDA)) == (not REFUSED.keys().isdisjoint(names))
    if not within:
        assert refused is None
    if refused is not None:
        assert refused.node in within, (refused, list(within))
