"""What the whole backward as one graph refuses: it says so, and leaves no gradient out in silence."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import UsageError
from stepgraph.program.copies import is_copy

X = torch.randn(4, 4)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(h).square().mean()


def engine(**options):
    made = stepgraph.Engine(Broken(), loss=lambda m, x: m(x), plan="ddp", lowering="eager")
    made.compile("eager", **options)
    return made


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_of_chosen_inputs_are_refused(retain):
    made = engine(compiled_autograd=True)
    chosen = [made.model.first.weight]
    with pytest.raises(UsageError, match="chosen inputs"):
        made(X).backward(inputs=chosen, retain_graph=retain)
    with pytest.raises(UsageError, match="chosen inputs"):
        torch.autograd.grad(made(X), chosen)
    assert all(parameter.grad is None for parameter in made.model.parameters())
    made(X).backward()
    assert all(parameter.grad is not None for parameter in made.model.parameters())


def test_without_compiled_autograd_they_are_had():
    made = engine()
    made(X).backward(inputs=[made.model.first.weight])
    assert made.model.first.weight.grad is not None and made.model.last.weight.grad is None


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_what_waits_on_the_host_comes_back_within_the_one_graph(lowering):
    found = []
    for memory in ("none", {"*": "offload"}):
        torch.manual_seed(0)
        made = stepgraph.Engine(Broken(), loss=lambda m, x: m(x), plan="ddp", memory=memory)
        made.compile(lowering, compiled_autograd=True)
        made(X).backward()
        found.append([p.grad.to_local() for p in made.model.parameters()])
        graphs = made.programs.values()
        assert any(is_copy(n) for p in graphs for n in p.operations()) == (memory != "none")
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def hooked():
    made, seen = engine(compiled_autograd=True), []
    made.model.first.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad is None)
    )
    made(X).backward()
    return seen


@pytest.mark.slow
def test_hooks_that_run_after_a_gradient_is_added_run_once_and_with_it():
    """torch clones what they are given by its storage, which a DTensor refuses: mostly, not always."""
    assert hooked() == [False]
    for _ in range(3):
        assert launch(hooked, ranks=2) == [[False], [False]]


def test_two_names_of_one_setting_may_not_contradict_each_other():
    with pytest.raises(UsageError, match="contradict"):
        engine(compiled_autograd=True, compiled_autograd_enabled=False)
    engine(compiled_autograd=False, compiled_autograd_enabled=True)
