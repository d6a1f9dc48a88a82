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


class Broken(torch.nn.Module):
    """Breaks its graph between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(h).square().mean()


def broken_engine(**options):
    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepgraph.Engine(
        model, loss=lambda m, x: m(x), optimizer=optimizer, plan="ddp", lowering="eager", **options
    )


def test_a_gradient_hook_that_moves_the_model_to_graph_by_graph_is_a_compilation():
    made = engine()
    made.step(regression_batch(4))
    handle = made.model.first.weight.register_hook(lambda gradient: gradient * 2)
    with stepgraph.no_recompiles(after=0):
        with pytest.raises(RecompilationError, match="graph by graph.*gradient hook"):
            made.step(regression_batch(4))
        handle.remove()
        made.step(regression_batch(4))
    made.model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    made.step(regression_batch(4))
    assert any("graph by graph" in reason for reason in made.stats.recompiles)


def test_the_first_whole_backward_after_warm_up_is_a_compilation():
    made, x = broken_engine(), torch.randn(4, 4)
    made.step(x)
    made.compile("eager", compiled_autograd=True)
    refused = pytest.raises(RecompilationError, match="the whole backward, for the first time")
    with stepgraph.no_recompiles(after=0), refused:
        made.step(x)
    made.step(x)
    assert [r for r in made.stats.recompiles if "the whole backward" in r]
    with stepgraph.no_recompiles(after=0):
        made.step(x)


def test_graph_by_graph_a_call_is_one_call_whatever_its_micro_batches():
    made, x = broken_engine(micro_batches=4), torch.randn(4, 4)
    made.compile("eager", compiled_autograd=True)
    with stepgraph.no_recompiles(after=1):
        made.step(x)
        assert made.stats.recompiles == []
        made.step(x)
        with pytest.raises(RecompilationError, match="at call 3"):
            made.step(torch.randn(8, 4))
