"""no_recompiles: a compilation past warm-up raises, before anything is compiled."""

import pytest
import torch

import stepgraph
from stepgraph.errors import RecompilationError
from tests.support import mlp, regression_batch


def engine():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepgraph.Engine(model, optimizer=optimizer, lowering="eager")


def test_compiling_during_warm_up_is_allowed_and_afterwards_refused_with_the_reason():
    made = engine()
    with stepgraph.no_recompiles(after=2):
        made.step(regression_batch(4))
        made.step(regression_batch(6))
        with pytest.raises(RecompilationError, match="new batch shape: .*8, 5"):
            made.step(regression_batch(8))
    assert made.stats.compiles == 2
    assert len(made.stats.recompiles) == 1


def test_entry_points_and_engines_warm_up_on_their_own():
    first, second = engine(), engine()
    with stepgraph.no_recompiles(after=1):
        first.step(regression_batch(4))
        second.step(regression_batch(4))
        first.evaluate(regression_batch(4))
        first.step(regression_batch(4))
        with pytest.raises(RecompilationError):
            first.step(regression_batch(6))


def test_outside_the_block_everything_compiles():
    made = engine()
    with stepgraph.no_recompiles(after=0), pytest.raises(RecompilationError):
        made.step(regression_batch(4))
        made.step(regression_batch(6))
    made.step(regression_batch(6))
    assert made.stats.compiles == 2


def test_a_changed_learning_rate_compiles_nothing():
    made = engine()
    with stepgraph.no_recompiles(after=1):
        for step in range(3):
            made._optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            made.step(regression_batch(4))
    assert made.stats.compiles == 1


def test_freezing_a_parameter_is_named_as_the_reason():
    made = engine()
    made.step(regression_batch(4))
    made.model.first.weight.requires_grad_(False)
    made.step(regression_batch(4))
    assert made.stats.recompiles == ["step: requires_grad changed: first.weight"]
