"""What of an optimizer's step is one operation."""

import functools

import pytest
import torch
from torch import nn

from stepgraph.capture.optimizer import functionalize_optimizer
from stepgraph.operators.updates import ADAM, ADAMW, computed, operations_in

aten = torch.ops.aten


def rule(make, shape=(4, 3)):
    parameter = nn.Parameter(torch.ones(shape))
    functional = functionalize_optimizer(make([parameter]), {"p": parameter})
    return functional.rule("p", parameter)


ELEMENTWISE = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_text_computes_what_the_rule_does(name):
    torch.manual_seed(0)
    found = rule(ELEMENTWISE[name])
    whole, graph = found.whole, found.graph
    assert whole is not None
    given = [
        torch.rand(node.meta["val"].shape, dtype=node.meta["val"].dtype) * 0.4 + 0.3
        for node in graph.graph.find_nodes(op="placeholder")
    ]
    values = {}

    class Watched(torch.fx.Interpreter):
        def run_node(self, n):
            values[n] = super().run_node(n)
            return values[n]

    Watched(graph).run(*given)
    tensors, numbers = ([values[n] for n in nodes] for nodes in (whole.tensors, whole.numbers))
    for node, value in zip(whole.results, computed(tensors, numbers, whole.text), strict=True):
        assert torch.equal(values[node], value)


def test_a_copy_of_what_nobody_writes_is_none():
    assert aten.clone.default not in operations_in(rule(torch.optim.AdamW).whole.text)


def test_numbers_stay_outside():
    text = rule(torch.optim.AdamW).whole.text
    assert not any(target is aten.pow.Tensor_Tensor for target in operations_in(text))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_step_that_mixes_elements_is_spelt_out():
    assert rule(torch.optim.Muon).whole is None


def test_a_parameter_without_dimensions_is_a_number():
    assert rule(torch.optim.AdamW, ()).whole is None


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Wrapped(torch.optim.AdamW):
    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure=None):
        return super().step(closure)


class Signed(torch.optim.AdamW):
    def _init_group(self, group, params, grads, *rest):
        found = super()._init_group(group, params, grads, *rest)
        grads[:] = [gradient.sign() for gradient in grads]
        return found


@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        (torch.optim.AdamW, ADAMW),
        (torch.optim.Adam, ADAM),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ""),
        (lambda p: torch.optim.AdamW(p, maximize=True), ""),
        (torch.optim.NAdam, ""),
        (OwnStep, ""),
        (Wrapped, ""),
        (Signed, ""),
    ],
)
def test_torchs_kernel_is_named_where_it_is_the_same_step(make, kernel):
    assert rule(make).kernel == kernel
