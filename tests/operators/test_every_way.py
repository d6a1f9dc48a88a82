"""Rules for a torch whose own follow their arguments: right by execution, and what a newer torch says."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph import torch_internals
from stepgraph.operators import every_way as module
from stepgraph.operators.every_way import kinds_apart
from stepgraph.operators.sharding import Rules
from stepgraph.operators.ways import RULES, WHERE_TORCH_HAS_NONE
from stepgraph.program.layout import InnerShard
from stepgraph.program.program import tensors_of
from stepgraph.torch_internals import operators as private
from stepgraph.torch_internals.operators import Absent
from stepgraph.torch_internals.sharding import SIZE_ADJUSTERS, knows_every_way
from tests.operators.test_sharding import (
    RANKS,
    ints,
    local_results,
    offered,
    one_operation,
    rand,
)

aten = torch.ops.aten
SAYS_ALL = knows_every_way(aten.add.Tensor)


def statistics(value, *args):
    """Of a norm's forward: mean and reciprocal deviation."""
    return aten.native_layer_norm.default(value, *args, 1e-5)[1:]


IMAGES, FILTERS = rand(4, 2, 6, 6), rand(4, 2, 3, 3)
ROWS, WEIGHT, BIAS = rand(4, 6, 8), rand(8), rand(8)
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CHANNELS = tuple(rand(2).abs() for _ in range(4))
POOLED = aten.max_pool2d_with_indices.default(IMAGES, [2, 2])

CASES = {
    "add": (aten.add.Tensor, (rand(4, 6), rand(4, 6))),
    "add, broadcast": (aten.add.Tensor, (rand(4, 6), rand(6))),
    "add, both broadcast": (aten.add.Tensor, (rand(4, 1), rand(1, 6))),
    "add, a number": (aten.add.Tensor, (rand(4, 6), 2.0)),
    "sub": (aten.sub.Tensor, (rand(4, 6), rand(4, 6))),
    "mul": (aten.mul.Tensor, (rand(4, 6), rand(4, 1))),
    "mul, a number": (aten.mul.Tensor, (rand(4, 6), 2.0)),
    "div": (aten.div.Tensor, (rand(4, 6), rand(4, 6).abs() + 1)),
    "neg": (aten.neg.default, (rand(4, 6),)),
    "tanh": (aten.tanh.default, (rand(4, 6),)),
    "tanh backward": (aten.tanh_backward.default, (rand(4, 6), rand(4, 6))),
    "maximum": (aten.maximum.default, (rand(4, 6), rand(4, 6))),
    "minimum": (aten.minimum.default, (rand(4, 6), rand(4, 6))),
    "masks": (aten.bitwise_and.Tensor, (rand(1, 1, 6, 6) > 0, rand(4, 1, 1, 6) > 0)),
    "where": (aten.where.self, (rand(4, 1) > 0, rand(4, 6), rand(1)[0])),
    "clone": (aten.clone.default, (rand(4, 6),)),
    "one row": (aten.exp.default, (rand(1, 6),)),
    "cast": (private.TO_COPY, (rand(4, 6),), {"dtype": torch.float64}),
    "cast to integers": (private.TO_COPY, (rand(4, 6),), {"dtype": torch.int64}),
    "cast to truths": (private.TO_COPY, (rand(4, 6),), {"dtype": torch.bool}),
    "pad": (aten.constant_pad_nd.default, (rand(4, 6, 2), [0, 0, 1, 0])),
    "pad, ones": (aten.constant_pad_nd.default, (rand(4, 6), [1, 1], 1.0)),
    "flip": (aten.flip.default, (rand(4, 6), [-1])),
    "roll": (aten.roll.default, (rand(4, 6), [1], [1])),
    "roll, flat": (aten.roll.default, (rand(4, 6), [1])),
    "max": (aten.max.dim, (rand(4, 6, 2), 1)),
    "min, kept": (aten.min.dim, (rand(4, 6, 2), 0, True)),
    "layer norm": (aten.native_layer_norm.default, (ROWS, [8], WEIGHT, BIAS, 1e-5)),
    "layer norm, plain": (aten.native_layer_norm.default, (ROWS, [6, 8], None, None, 1e-5)),
    "layer norm backward": (
        aten.native_layer_norm_backward.default,
        (rand(4, 6, 8), ROWS, [8], *statistics(ROWS, [8], WEIGHT, BIAS), WEIGHT, BIAS, [True] * 3),
    ),
    "group norm": (
        aten.native_group_norm.default,
        (IMAGES, rand(2), rand(2), 4, 2, 36, 1, 1e-5),
    ),
    "batch norm": (
        private.BATCH_NORM_FUNCTIONAL,
        (IMAGES, *CHANNELS, True, 0.1, 1e-5),
    ),
    "batch norm, frozen": (private.BATCH_NORM_FROZEN, (IMAGES, *CHANNELS, 0.1, 1e-5)),
    "batch norm backward": (
        aten.native_batch_norm_backward.default,
        (
            rand(4, 2, 6, 6),
            IMAGES,
            CHANNELS[0],
            *CHANNELS[2:],
            *CHANNELS[:2],
            True,
            1e-5,
            [True] * 3,
        ),
    ),
    "convolution": (aten.convolution.default, (IMAGES, FILTERS, rand(4), *CONVOLUTION)),
    "convolution, plain": (aten.convolution.default, (IMAGES, FILTERS, None, *CONVOLUTION)),
    "convolution backward": (
        aten.convolution_backward.default,
        (rand(4, 4, 6, 6), IMAGES, FILTERS, [4], *CONVOLUTION, [True] * 3),
    ),
    "max pool": (aten.max_pool2d_with_indices.default, (IMAGES, [2, 2])),
    "max pool backward": (
        aten.max_pool2d_with_indices_backward.default,
        (rand(4, 2, 3, 3), IMAGES, [2, 2], [2, 2], [0, 0], [1, 1], False, POOLED[1]),
    ),
    "average pool": (aten.avg_pool2d.default, (IMAGES, [2, 2])),
    "adaptive pool": (private.ADAPTIVE_AVERAGE_POOL, (IMAGES, [2, 2])),
    "adaptive pool backward": (private.ADAPTIVE_AVERAGE_POOL_BACKWARD, (rand(4, 2, 2, 2), IMAGES)),
    "upsample": (aten.upsample_nearest2d.default, (IMAGES, [12, 12])),
    "upsample, smooth": (aten.upsample_bilinear2d.default, (IMAGES, [12, 12], False)),
    "upsample backward": (
        aten.upsample_nearest2d_backward.default,
        (rand(4, 2, 12, 12), [12, 12], [4, 2, 6, 6]),
    ),
    "upsample backward, smooth": (
        aten.upsample_bilinear2d_backward.default,
        (rand(4, 2, 12, 12), [12, 12], [4, 2, 6, 6], False),
    ),
    "squeeze": (aten.squeeze.dims, (rand(4, 1, 6, 1), [1, 3])),
    "variance": (aten.var_mean.correction, (rand(4, 6, 2), [1]), {"correction": 1}),
    "variance, kept": (
        *(aten.var_mean.correction, (rand(4, 6, 2), [-1])),
        {"correction": 1, "keepdim": True},
    ),
    "any": (aten.any.dims, (rand(4, 6, 2) > 1, [1])),
    "index": (aten.index.Tensor, (rand(4, 6), [None, ints(6, 2)])),
    "index, rows": (aten.index.Tensor, (rand(8, 6), [ints(8, 4, 2)])),
    "index, apart": (aten.index.Tensor, (rand(4, 6, 8), [ints(4, 2), None, ints(8, 2)])),
    "index, broadcast": (aten.index.Tensor, (rand(4, 6, 8), [ints(4, 2, 1), ints(6, 4)])),
    "index put": (aten.index_put.default, (rand(8, 6), [ints(8, 4)], rand(4, 6), True)),
    "index put, columns": (
        aten.index_put.default,
        (rand(4, 6), [None, torch.tensor([1, 3])], rand(4, 2)),
    ),
    "index put, one row": (aten.index_put.default, (rand(8, 6), [ints(8, 4)], rand(1, 6), True)),
    "index select": (aten.index_select.default, (rand(4, 6), 1, ints(6, 2))),
    "select scatter": (aten.select_scatter.default, (rand(4, 6), rand(4), 1, 2)),
    "fused norm": (private.FUSED_RMS_NORM, (ROWS, [8], WEIGHT, 1e-5)),
}
CASES = {
    name: (case[0], case[1], case[2] if len(case) > 2 else {})
    for name, case in CASES.items()
    if not isinstance(case[0], Absent)
}


@pytest.fixture
def own_rules(monkeypatch):
    """Rules of a torch that has none."""
    monkeypatch.setattr(module, "knows_every_way", lambda op: False)
    monkeypatch.setattr(torch_internals, "has_sharding_rule", lambda op: False)
    return Rules(RANKS, others=1, extra={None: None})  # answers are shared by those without extra


@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_operators_result(name, own_rules, monkeypatch):
    target, args, kwargs = CASES[name]
    program, node, given = one_operation(target, args, kwargs)
    expected = tensors_of(target(*args, **kwargs))
    ways = offered(own_rules, node)
    assert any(isinstance(p, Shard) for way in ways for p in way.inputs) == ("flat" not in name)
    for way in ways:
        found = local_results(program, node, way, given)
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(
                have, want, rtol=1e-4, atol=1e-4, msg=lambda m, way=way: f"{way}\n{m}"
            )


@pytest.mark.skipif(not SAYS_ALL, reason="this torch's own rules follow their arguments")
@pytest.mark.parametrize(
    "name", [name for name, (op, *_) in CASES.items() if op not in WHERE_TORCH_HAS_NONE]
)
def test_torch_says_the_same_where_it_says_all(name, own_rules):
    _, node, _ = one_operation(*CASES[name])
    mine = offered(own_rules, node)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "knows_every_way", lambda op: True)
        assert {*mine} == {*offered(Rules(RANKS, extra={0: None}), node)}


def test_every_rule_is_executed():
    targets = {target for target, _, _ in CASES.values()}
    packets = {getattr(target, "overloadpacket", target) for target in targets}
    known = {op for op in (*RULES, *WHERE_TORCH_HAS_NONE) if not isinstance(op, Absent)}
    assert {op.overloadpacket for op in known} - packets == {
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._fused_rms_norm_backward,
    }


def test_older_rules_are_asked_about_one_kind_of_shards_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "knows_every_way", lambda op: False)
    inner, whole, pending = InnerShard(1, 2), Replicate(), Partial()
    assert kinds_apart((Shard(0), pending)) == [((Shard(0), pending), 1)]
    assert kinds_apart((inner, pending)) == [((Shard(1), pending), 2)]
    assert kinds_apart((inner, Shard(0))) == [((Shard(1), whole), 2), ((whole, Shard(0)), 1)]


@pytest.mark.parametrize("name", ["slice", "select", "cat", "sum", "softmax"])
def test_a_shard_of_blocks_is_a_shard(name):
    """Torch 2.11 took it for none: it sliced, joined and reduced along what was sharded."""
    from tests.operators.test_sharding import CASES as OPERATORS

    target, args, kwargs = {
        "slice": (aten.slice.Tensor, (rand(8, 8), 1, 0, 4), {}),
        "select": (aten.select.int, (rand(3, 8, 8), 0, 1), {}),
        "cat": (aten.cat.default, ([rand(8, 8), rand(8, 8)], -1), {}),
        "sum": (aten.sum.dim_IntList, (rand(8, 8), [0]), {}),
        "softmax": OPERATORS["softmax"],
    }[name]
    program, node, given = one_operation(target, args, kwargs)
    for way in offered(Rules(RANKS), node):
        for have, want in zip(
            local_results(program, node, way, given),
            tensors_of(target(*args, **kwargs)),
            strict=True,
        ):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4, msg=str(way))


def test_group_norm_of_a_part_is_told_the_parts_sizes():
    """As torch 2.13 does itself."""
    target = aten.native_group_norm.default
    mesh = torch_internals.planning_mesh((RANKS,))
    spec = torch_internals.tensor_spec(mesh, (Shard(0),), IMAGES)
    args = torch_internals.adjust_scalar_shapes(
        target, SIZE_ADJUSTERS[target], (spec, None, None, 4, 2, 36, 1, 1e-5), {}, [spec]
    )
    assert tuple(args[3:6]) == (2, 2, 36)
