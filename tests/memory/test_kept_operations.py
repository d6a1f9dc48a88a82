"""Policy ``ops``: what is dear for its size is kept, the rest of each block is computed again."""

import pytest
import torch
from torch import nn

from stepgraph.analysis.blocks import find_blocks
from stepgraph.cost.work import family_of, node_flops
from stepgraph.memory.decide import decide
from stepgraph.memory.kept_operations import first_residual, kept_operations
from stepgraph.memory.passes.recompute_in_backward import recompute_in_backward
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program
from tests.support import captured, mlp, regression_batch, tiny_llama, token_batch

aten = torch.ops.aten


@pytest.fixture(scope="module")
def program() -> Program:
    return captured(tiny_llama(4), token_batch(2))


def inside(program, block):
    return list(program.operations(FORWARD))[block.start : block.stop]


def test_attention_and_every_other_product_are_kept(program):
    for block in find_blocks(program):
        nodes = inside(program, block)
        products = [n for n in nodes if node_flops(n)]
        attention = [n for n in products if family_of(n.target).startswith("attention")]
        others = [n for n in products if n not in attention]
        assert (len(attention), len(others)) == (1, 7)  # q k v o, gate up down
        kept = kept_operations(nodes)
        assert {*attention, *others[::2]} <= kept
        assert not kept & {*others[1::2]}
        assert len(kept) == 1 + 4 + 1


def test_the_first_residual_sum_of_a_block_is_kept(program):
    for block in find_blocks(program):
        nodes = inside(program, block)
        (first,) = first_residual(nodes)
        assert first in kept_operations(nodes)
        sums = [n for n in nodes if n.target is aten.add.Tensor and meta(n)["val"].dim() == 3]
        assert first is next(
            n for n in sums if meta(n)["val"].shape[-1] == 16 and n.args[1] in nodes
        )


def test_what_is_not_kept_runs_again_in_the_backward(program):
    decision = decide(program, "ops")
    again = recompute_in_backward(program.copy(), decision)
    counts = {}
    for node in again.operations():
        name = meta(node).get("recomputed_from")
        if name is not None and node_flops(node):
            counts[family_of(node.target)] = counts.get(family_of(node.target), 0) + 1
    # Of seven products three are dropped in each of four blocks; the output of the last is never needed.
    assert counts.keys() == {"matmul"}
    assert 4 <= counts["matmul"] <= 12
    assert len(decide(program, "full").recompute) > len(decision.recompute)


def test_a_model_without_blocks_is_one():
    decision = decide(captured(mlp(), regression_batch()), "ops")
    assert decision.recompute and "no block repeats" in decision.notes[0]


def test_a_block_without_a_residual_has_none():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.sum()

    program = captured(Plain(), torch.ones(2, 4))
    assert not first_residual(list(program.operations(FORWARD)))
    assert decide(program, "ops").recompute


def test_a_residual_may_be_one_of_several_results():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
                for _ in range(3)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    assert decide(captured(Normed(), torch.ones(2, 3, 8)), "ops").recompute
