"""Hooks on all modules or optimizers there are: the user's count, torch's own, which watch, do not."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.flop_counter import FlopCounterMode

import stepgraph
from stepgraph.errors import HookError
from tests.beside import beside

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh()).square().mean()


class Broken(Net):
    """The same, captured graph by graph."""

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.last(hidden.tanh()).square().mean()


def doubled(module, inputs, result):
    """A hook behind a forward."""
    return result * 2 if isinstance(module, nn.Linear) else None


def doubled_before(module, inputs):
    """A hook in front of a forward."""
    return (inputs[0] * 2,) if isinstance(module, nn.Linear) else None


@pytest.mark.parametrize("make", [Net, Broken])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_all_forwards_are_those_of_the_moment(make, before):
    register = (
        modules.register_module_forward_pre_hook if before else modules.register_module_forward_hook
    )
    _, _, steps = beside(make, X)
    steps(9)  # nothing is compared any more that was not written to
    handle = register(doubled_before if before else doubled)
    try:
        steps(3)
    finally:
        handle.remove()
    steps(3)


def test_hooks_on_all_backwards_and_on_all_optimizers_are_errors_not_dropped():
    engine, _, steps = beside(Net, X)
    steps(9)
    for register, hook in (
        (modules.register_module_full_backward_hook, lambda *_: None),
        (modules.register_module_full_backward_pre_hook, lambda *_: None),
        (optimizers.register_optimizer_step_post_hook, lambda *_: None),
    ):
        handle = register(hook)
        try:
            with pytest.raises(HookError, match="all modules have|all optimizers have"):
                engine.step(X)
            with pytest.raises(HookError, match="all modules have|all optimizers have"):
                beside(Net, X)
        finally:
            handle.remove()
    steps(2)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_counter_of_flops_around_a_first_step_counts_the_step(lowering):
    def counted(step):
        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops()

    model = Net()
    engine = stepgraph.Engine(
        model,
        loss=lambda m, x: m(x),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        plan="ddp",
        lowering=lowering,
        strict=True,
    )
    first, second = counted(lambda: engine.step(X)), counted(lambda: engine.step(X))
    plain = counted(lambda: Net()(X).backward())
    assert first == second
    assert lowering == "inductor" or first == plain
    assert engine.stats.compiles == 1 and not engine.stats.recompiles
    assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks
