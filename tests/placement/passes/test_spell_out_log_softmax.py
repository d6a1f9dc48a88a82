"""spell_out_log_softmax, and what a rank does alone where rows or classes are cut."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from stepgraph.operators.sharding import Rules
from stepgraph.placement.passes.spell_out_log_softmax import spell_out_log_softmax
from stepgraph.placement.rules.vocabulary import STRATEGIES
from stepgraph.runtime.ranks import parse_mesh
from tests.operators.test_sharding import RANKS, local_results, one_operation
from tests.support import assert_golden, assert_summation, captured, values

aten = torch.ops.aten
SPELLED = {aten._log_softmax.default, aten._log_softmax_backward_data.default}


class Classifier(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=dtype))

    def forward(self, x):
        return -torch.log_softmax(x @ self.weight, -1)[:, 0].sum()


def test_the_text_shows_maxima_and_sums():
    program = captured(Classifier(), torch.ones(2, 4))
    after = spell_out_log_softmax(program.copy(), parse_mesh("tp=2"))
    assert not any(node.target in SPELLED for node in after.operations())
    assert_golden(__file__, "spell_out_log_softmax", program, after)


def test_where_no_classes_are_sharded_it_stays():
    program = captured(Classifier(), torch.ones(2, 4))
    assert str(spell_out_log_softmax(program.copy(), parse_mesh("dp=2"))) == str(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_results_are_the_same_up_to_summation(dtype, scale):
    model, x = Classifier(dtype), scale * torch.randn(3, 4).to(dtype)
    program = captured(model, x)
    inputs = values(model, x)
    old = inputs.execute(program)
    assert_summation(old, inputs.execute(spell_out_log_softmax(program.copy(), parse_mesh("tp=2"))))


def ints(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "embedding": (aten.embedding.default, (rand(10, 6), ints(10, 4, 8))),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        (rand(4, 8, 6), ints(10, 4, 8), 10, -1, False),
    ),
    "embedding backward, padding": (
        aten.embedding_dense_backward.default,
        (rand(4, 8, 6), ints(10, 4, 8), 10, 3, False),
    ),
    "gather": (aten.gather.default, (rand(4, 6), 1, ints(6, 4, 1))),
    "gather, several": (aten.gather.default, (rand(4, 6), -1, ints(6, 4, 3))),
    "scatter": (aten.scatter.value, (rand(4, 6), 1, ints(6, 4, 1), -1.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rank_answers_for_its_own_rows(name):
    target, args = CASES[name]
    program, node, given = one_operation(target, args, {})
    strategies = STRATEGIES[target](node, ())
    assert strategies
    for strategy in strategies:
        (result,) = local_results(program, node, strategy, given)
        torch.testing.assert_close(result, target(*args))


def test_every_entry_is_executed():
    assert {target for target, _ in CASES.values()} == set(STRATEGIES)


def test_rows_that_do_not_divide_are_not_cut():
    rules = Rules(RANKS)
    rules.extra = STRATEGIES
    _, node, _ = one_operation(aten.embedding.default, (rand(9, 6), ints(9, 4)), {})
    found = rules.strategies(node, (Replicate(), Replicate()))
    assert not any(strategy.inputs[0] == Shard(0) for strategy in found)
