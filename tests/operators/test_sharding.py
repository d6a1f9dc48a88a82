"""Strategies are right by execution: run locally under each, joined, an operator's result is the same."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph import torch_internals
from stepgraph.equivalence.lockstep import run_lockstep
from stepgraph.operators.attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_BIAS_BACKWARD,
)
from stepgraph.operators.entries import FOLLOWERS, TABLE, Strategy
from stepgraph.operators.flex import FLEX, FLEX_BACKWARD
from stepgraph.operators.sharding import Rules
from stepgraph.operators.updates import UPDATE
from stepgraph.placement.passes.place_values import place_values
from stepgraph.planning.decisions import OperationPlacement, PlacementDraft
from stepgraph.program import randomness, roles
from stepgraph.program.layout import InnerShard
from stepgraph.program.names import name_operations
from stepgraph.program.program import FORWARD, Program, Value, tensor_arguments, tensors_of
from stepgraph.program.shards import join, split
from stepgraph.runtime.ranks import parse_mesh

aten = torch.ops.aten
RANKS = 2
RANDOM = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=RANDOM)


def ints(high, *shape):
    return torch.randint(0, high, shape, generator=RANDOM)


def attention(mask=None, keep=None, heads=4):
    rows = [rand(2, n, 6, 8) for n in (4, heads, heads)]
    return (*rows, mask, keep, False, 0.3, 0.1 if keep is not None else 0.0), {}


def attention_backward(mask=None, keep=None, heads=4):
    (*arguments, causal, scale, dropout), _ = attention(mask, keep, heads)
    result = ATTENTION(*arguments, causal, scale, dropout)
    return (rand(2, 4, 6, 8), *arguments, *result, causal, scale, dropout), {}


_SCORE = "def f(score, b, h, q, k, t0, t1): v0 = "
SLOPED = (
    f"{_SCORE}look(t0, [h]); v1 = aten.mul.Tensor(v0, t1); v2 = aten.add.Tensor(score, v1); "
    "return v2"
)
COUNTED = f"{_SCORE}aten.add.Tensor(score, b); return v0"
WITHIN = (
    "def f(b, h, q, k, t0): v0 = look(t0, [b, q]); v1 = look(t0, [b, k]); "
    "v2 = aten.eq.Tensor(v0, v1); return v2"
)


def flexible(heads=4, score=SLOPED):
    """Slopes of heads, a number for all, documents of rows, blocks of rows."""
    rows = [rand(2, n, 6, 8) for n in (4, heads, heads)]
    counts, indices = (
        torch.ones(2, 1, 1, dtype=torch.int32),
        torch.zeros(2, 1, 1, 1, dtype=torch.int32),
    )
    others = [rand(4), rand(1)[0]], [ints(2, 2, 6)], [counts, indices, counts, indices]
    return (*rows, *others, score, WITHIN, 0.3, [6, 6, 128, 128, 0], "{}"), {}


def flexible_backward(heads=4, score=SLOPED):
    arguments, _ = flexible(heads, score)
    result = FLEX(*arguments)
    return (rand(2, 4, 6, 8), *arguments[:6], *result, *arguments[6:], [0, 1]), {}


# Every entry of the table, then a sample of what models are made of.
CASES = {
    "arange": (aten.arange.default, (4,), {}),
    "arange start": (aten.arange.start, (1, 5), {}),
    "arange step": (aten.arange.start_step, (0, 8, 2), {}),
    "full": (aten.full.default, ([4, 6], 2.0), {}),
    "zeros": (aten.zeros.default, ([4, 6],), {}),
    "ones": (aten.ones.default, ([4, 6],), {}),
    "empty": (aten.empty.memory_format, ([4, 6],), {}),
    "scalar": (aten.scalar_tensor.default, (2.0,), {}),
    "eye": (aten.eye.default, (4,), {}),
    "linspace": (aten.linspace.default, (0.0, 1.0, 4), {}),
    "random": (
        randomness.RANDOM,
        (randomness.seed_words(1, 2, 0), "bits", 3, [4, 6, 2], [4, 6, 2], [0, 0, 0], [], ""),
        {},
    ),
    "update": (
        UPDATE,
        (
            [rand(4, 6), rand(4, 6)],
            [rand(1)[0]],
            "def f(t0, t1, n0): v0 = aten.mul.Tensor(t1, n0); "
            "v1 = aten.add.Tensor(t0, v0); return [v1, v0]",
            "",
            [],
        ),
        {},
    ),
    "lift": (aten.lift_fresh_copy.default, (rand(4, 6),), {}),
    "embedding": (aten.embedding.default, (rand(10, 6), ints(10, 4, 8)), {}),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        (rand(4, 8, 6), ints(10, 4, 8), 10, -1, False),
        {},
    ),
    "attention": (ATTENTION, *attention()),
    "attention, mask": (ATTENTION, *attention(rand(2, 1, 6, 6))),
    "attention, one mask": (ATTENTION, *attention(rand(1, 1, 6, 6) > 0)),
    "attention, dropout": (ATTENTION, *attention(keep=rand(2, 4, 6, 6) > 0)),
    "attention, groups of heads": (ATTENTION, *attention(heads=2)),
    "attention backward": (ATTENTION_BACKWARD, *attention_backward()),
    "attention backward, one head of keys": (ATTENTION_BACKWARD, *attention_backward(heads=1)),
    "attention backward, dropout": (
        ATTENTION_BACKWARD,
        *attention_backward(rand(2, 1, 6, 6), rand(2, 4, 6, 6) > 0),
    ),
    "attention backward, bias": (
        ATTENTION_BIAS_BACKWARD,
        *attention_backward(rand(1, 4, 6, 6)),
    ),
    "attention backward, bias of rows": (
        ATTENTION_BIAS_BACKWARD,
        *attention_backward(rand(2, 1, 1, 6)),
    ),
    "flex attention": (FLEX, *flexible()),
    "flex attention, groups of heads": (FLEX, *flexible(heads=2)),
    "flex attention, counted rows": (FLEX, *flexible(score=COUNTED)),
    "flex attention backward": (FLEX_BACKWARD, *flexible_backward()),
    "flex attention backward, one head of keys": (FLEX_BACKWARD, *flexible_backward(heads=1)),
    "mm": (aten.mm.default, (rand(4, 6), rand(6, 8)), {}),
    "bmm": (aten.bmm.default, (rand(2, 4, 6), rand(2, 6, 8)), {}),
    "addmm": (aten.addmm.default, (rand(8), rand(4, 6), rand(6, 8)), {}),
    "add": (aten.add.Tensor, (rand(4, 6), rand(4, 6)), {}),
    "add, broadcast": (aten.add.Tensor, (rand(4, 6), rand(6)), {}),
    "mul": (aten.mul.Tensor, (rand(4, 6), rand(4, 1)), {}),
    "div": (aten.div.Tensor, (rand(4, 6), rand(4, 6).abs() + 1), {}),
    "tanh": (aten.tanh.default, (rand(4, 6),), {}),
    "where": (aten.where.self, (rand(4, 6) > 0, rand(4, 6), rand(4, 6)), {}),
    "sum": (aten.sum.default, (rand(4, 6),), {}),
    "sum, columns": (aten.sum.dim_IntList, (rand(4, 6), [1]), {}),
    "sum, kept": (aten.sum.dim_IntList, (rand(4, 6), [0], True), {}),
    "mean": (aten.mean.default, (rand(4, 6),), {}),
    "mean, columns": (aten.mean.dim, (rand(4, 6), [1], True), {}),
    "amax": (aten.amax.default, (rand(4, 6), [1]), {}),
    "softmax": (aten._softmax.default, (rand(4, 6), 1, False), {}),
    "log softmax": (aten._log_softmax.default, (rand(4, 6), 0, False), {}),
    "layer norm": (aten.native_layer_norm.default, (rand(4, 6), [6], rand(6), rand(6), 1e-5), {}),
    "view, merge": (aten.view.default, (rand(4, 6, 8), [24, 8]), {}),
    "view, split": (aten.view.default, (rand(4, 6, 8), [4, 6, 2, 4]), {}),
    "unsafe view": (aten._unsafe_view.default, (rand(4, 6, 8), [24, 8]), {}),
    "expand": (aten.expand.default, (rand(4, 1), [4, 6]), {}),
    "permute": (aten.permute.default, (rand(4, 6, 8), [2, 0, 1]), {}),
    "t": (aten.t.default, (rand(4, 6),), {}),
    "transpose": (aten.transpose.int, (rand(4, 6), 0, 1), {}),
    "unsqueeze": (aten.unsqueeze.default, (rand(4, 6), 1), {}),
    "squeeze": (aten.squeeze.dim, (rand(4, 1, 6), 1), {}),
    "slice": (aten.slice.Tensor, (rand(4, 6), 1, 0, 3), {}),
    "select": (aten.select.int, (rand(4, 6), 1, 2), {}),
    "cat": (aten.cat.default, ([rand(4, 6), rand(4, 2)], 1), {}),
    "split": (aten.split.Tensor, (rand(4, 6), 2, 1), {}),
    "gather": (aten.gather.default, (rand(4, 6), 1, ints(6, 4, 2)), {}),
    "index": (aten.index.Tensor, (rand(4, 6), [None, ints(6, 3)]), {}),
    "index select": (aten.index_select.default, (rand(4, 6), 1, ints(6, 3)), {}),
    "convolution": (
        aten.convolution.default,
        (rand(4, 6, 8), rand(2, 6, 3), rand(2), [1], [1], [1], False, [0], 1),
        {},
    ),
    "group norm": (
        aten.native_group_norm.default,
        (rand(4, 6, 8), rand(6), rand(6), 4, 6, 8, 2, 1e-5),
        {},
    ),
    "cumsum": (aten.cumsum.default, (rand(4, 6), 1), {}),
    "tril": (aten.tril.default, (rand(4, 6),), {}),
    "constant pad": (aten.constant_pad_nd.default, (rand(4, 6), [1, 1]), {}),
    "flip": (aten.flip.default, (rand(4, 6), [1]), {}),
    "argmax": (aten.argmax.default, (rand(4, 6), 1), {}),
}


def one_operation(target, args, kwargs):
    """A Program that is this operation, and its inputs' values."""
    mode = torch_internals.new_fake_mode()
    graph, given = fx.Graph(), []

    def placeholder(value):
        node = graph.placeholder(f"x{len(given)}")
        node.meta = {"val": mode.from_tensor(value), "name": f"UserInput({len(given)}.x)"}
        given.append((node, value))
        return node

    tree = torch.utils._pytree.tree_map_only(torch.Tensor, placeholder, (args, kwargs))
    if not given:
        placeholder(torch.ones(1))  # a Program has inputs
    node = graph.call_function(target, *tree)
    node.meta = {"phase": FORWARD, "module": ""}
    with mode:
        fakes = fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
        node.meta["val"] = target(*fakes[0], **fakes[1])
    results = [node]
    if isinstance(node.meta["val"], (tuple, list)):
        results = []
        for index, value in enumerate(node.meta["val"]):
            result = graph.call_function(operator.getitem, (node, index))
            result.meta = {"phase": FORWARD, "module": "", "val": value}
            results.append(result)
    graph.output(tuple(results))
    name_operations(graph)
    described = [Value(tuple(v.shape), v.dtype) for _, v in given]
    outputs = [Value(tuple(r.meta["val"].shape), r.meta["val"].dtype) for r in results]
    program = Program(
        "operation",
        fx.GraphModule(torch.nn.Module(), graph),
        [roles.UserInput(i, "x") for i in range(len(given))],
        [roles.UserOutput(i) for i in range(len(results))],
        described,
        outputs,
    )
    return program, node, [value for _, value in given]


def offered(rules, node):
    """All strategies that the operator offers, however its arguments are placed."""
    choices = []
    for argument in tensor_arguments(node):
        value = argument.meta["val"]
        shards = [Shard(d) for d in range(value.dim()) if value.shape[d] % RANKS == 0]
        shards += [InnerShard(p.dim, 2) for p in shards if value.shape[p.dim] % (2 * RANKS) == 0]
        partial = [Partial()] if value.is_floating_point() else []
        choices.append([Replicate(), *shards, *partial])
    if len(choices) > 4:  # enough to see what the rules follow: all alike, and all replicated
        combinations = [[c[i] if i < len(c) else c[0] for c in choices] for i in range(6)]
    else:
        combinations = itertools.product(*choices)
    found = {}
    for placements in combinations:
        found |= dict.fromkeys(rules.strategies(node, tuple(placements)))
    return list(found)


def parts(value, placement):
    if isinstance(placement, InnerShard):
        return split(value, (placement,), parse_mesh(f"dp={RANKS}"))
    if isinstance(placement, Shard):
        return [part.contiguous() for part in value.chunk(RANKS, placement.dim)]
    if isinstance(placement, Partial):
        noise = torch.rand(value.shape, generator=RANDOM).to(value.dtype)
        return {
            "sum": [value - noise, noise],
            "avg": [value - noise, value + noise],
            "max": [value, value - noise.abs()],
            "min": [value, value + noise.abs()],
        }[placement.reduce_op]
    return [value.clone() for _ in range(RANKS)]


def joined(values, placement):
    if isinstance(placement, InnerShard):
        shape = list(values[0].shape)
        shape[placement.dim] *= RANKS
        return join(values, shape, (placement,), parse_mesh(f"dp={RANKS}"))
    if isinstance(placement, Shard):
        return torch.cat(values, placement.dim)
    if isinstance(placement, Partial):
        stack = torch.stack(values)
        kind = {"sum": "sum", "avg": "mean", "max": "amax", "min": "amin"}[placement.reduce_op]
        return getattr(stack, kind)(0)
    torch.testing.assert_close(values[0], values[1])
    return values[0]


def local_results(program, node, strategy, given):
    mesh = parse_mesh(f"dp={RANKS}")
    draft = PlacementDraft("test")
    placed = dict.fromkeys(range(len(given)), Replicate())
    for argument, placement in zip(tensor_arguments(node), strategy.inputs, strict=True):
        placed[program.placeholders.index(argument)] = placement
    draft.inputs = {roles.label(program.inputs[i]): (p,) for i, p in placed.items()}
    outputs = [p or Replicate() for p in strategy.outputs]
    draft.operations[node.meta["name"]] = OperationPlacement(
        tuple((p,) for p in strategy.inputs), tuple((p,) for p in outputs)
    )
    for result, placement in zip(program.results, outputs, strict=True):
        if result is not node:
            draft.operations[result.meta["name"]] = OperationPlacement(
                ((placement,),), ((placement,),)
            )
    draft.outputs = {
        roles.label(role): (p,) for role, p in zip(program.outputs, outputs, strict=True)
    }
    after = place_values(program.copy(), draft.decision(), mesh)
    columns = [parts(value, placed[i]) for i, value in enumerate(given)]
    rows = run_lockstep(after, list(zip(*columns, strict=True)))
    return [joined([row[i] for row in rows], p) for i, p in enumerate(outputs)]


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_gives_the_operators_result(name):
    target, args, kwargs = CASES[name]
    program, node, given = one_operation(target, args, kwargs)
    expected = tensors_of(target(*args, **kwargs))
    strategies = offered(Rules(RANKS), node)
    replicate = (Replicate(),) * len(given if tensor_arguments(node) else ())
    assert Strategy(replicate, (Replicate(),) * len(expected)) in strategies
    if target is aten.empty.memory_format:
        return  # its values mean nothing
    for strategy in strategies:
        for have, want in zip(local_results(program, node, strategy, given), expected, strict=True):
            torch.testing.assert_close(
                have, want, rtol=1e-4, atol=1e-4, msg=lambda m, s=strategy: f"{s}\n{m}"
            )


FACTORS = st.lists(st.sampled_from([1, 2, 3, 4]), max_size=3)


@given(st.data(), FACTORS)
@settings(max_examples=60, deadline=None)
def test_a_view_keeps_its_elements_on_their_ranks(data, factors):
    """Any view of any cut: what is offered is right by execution, and whole blocks stay cut."""
    primes = [2, 2, 2, *factors]
    old, new = (_grouped(data.draw(st.permutations(primes)), data.draw) for _ in range(2))
    program, node, values = one_operation(aten.view.default, (rand(*old), new), {})
    rules = Rules(RANKS)
    cuts = [
        InnerShard(dim, outer) if outer > 1 else Shard(dim)
        for dim, size in enumerate(old)
        for outer in (1, 2, 3, 4)
        if size % (outer * RANKS) == 0
    ]
    for cut in cuts:
        for strategy in rules.strategies(node, (cut,)):
            (have,) = local_results(program, node, strategy, values)
            torch.testing.assert_close(have, values[0].view(new), rtol=0, atol=0)


def _grouped(factors, draw):
    """Sizes of dimensions from a product of factors: neighbours multiplied at random."""
    sizes = [factors[0]]
    for factor in factors[1:]:
        if draw(st.booleans()):
            sizes[-1] *= factor
        else:
            sizes.append(factor)
    return sizes


@pytest.mark.parametrize(
    ("old", "new", "cut", "result"),
    [
        ((32,), (2, 16), InnerShard(0, 4), InnerShard(1, 2)),
        ((4, 8), (32,), Shard(1), InnerShard(0, 4)),
        ((2, 16), (32,), InnerShard(1, 2), InnerShard(0, 4)),
        ((2, 16), (4, 1, 8), InnerShard(1, 2), Shard(2)),
        ((6, 4), (3, 8), Shard(0), None),  # 3 rows a rank: 12 elements, half of the second row of 8
    ],
)
def test_blocks_are_counted_anew_in_a_views_result(old, new, cut, result):
    _, node, _ = one_operation(aten.view.default, (rand(*old), new), {})
    offered_now = Rules(RANKS).strategies(node, (cut,))
    assert (Strategy((cut,), (result,)) in offered_now) == (result is not None)
    assert len(offered_now) == 1 + (result is not None)


def test_every_entry_of_the_table_is_executed():
    assert {*TABLE, *FOLLOWERS} <= {target for target, _, _ in CASES.values()}


@pytest.mark.parametrize(
    "name", ["mm", "tanh", "layer norm", "embedding", "attention", "cat", "slice"]
)
def test_work_on_the_batch_can_be_divided(name):
    _, node, _ = one_operation(*CASES[name])
    assert any(
        isinstance(p, Shard)
        for s in offered(Rules(RANKS), node)
        for p in s.outputs
        if p is not None
    )


def test_uneven_shards_are_never_offered():
    _, node, _ = one_operation(aten.mm.default, (rand(3, 5), rand(5, 7)), {})
    for strategy in offered(Rules(RANKS), node):
        assert not any(isinstance(p, Shard) for p in strategy.inputs + strategy.outputs)


def test_an_operator_without_a_rule_is_replicated_only():
    rules = Rules(RANKS)
    _, node, _ = one_operation(aten.trace.default, (rand(4, 4),), {})
    assert [s.outputs for s in offered(rules, node)] == [(Replicate(),)]
    assert rules.without_rule == {"aten.trace.default"}


def test_a_question_is_asked_once(monkeypatch):
    rules = Rules(RANKS)
    _, node, _ = one_operation(*CASES["mm"])
    first = rules.strategies(node, (Shard(0), Replicate()))
    monkeypatch.setattr(rules, "_ask", None)
    assert rules.strategies(node, (Shard(0), Replicate())) is first
