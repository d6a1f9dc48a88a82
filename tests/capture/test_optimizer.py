"""Every torch optimizer that is tensor arithmetic becomes a function; the others say that they cannot."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.optimizer import functionalize_optimizer, group_numbers
from stepgraph.capture.update_rules import FIRST_STEP
from stepgraph.errors import OptimizerError
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import mlp, regression_batch

STEPS = 4
FUNCTIONAL = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD maximize": (optim.SGD, {"lr": 0.1, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.01}),
    "Adam decay": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam foreach": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "AdamW fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW maximize": (optim.AdamW, {"lr": 0.01, "maximize": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adagrad start": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01}),
    "RMSprop all": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.01, "t0": 2}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}
IMPOSSIBLE = {
    "LBFGS": (optim.LBFGS, {}),
    "SparseAdam": (optim.SparseAdam, {}),
    "Adafactor": (optim.Adafactor, {}),
}


def schedule(optimizer, step, numbers):
    for group in optimizer.param_groups:
        for name in numbers:
            if name == "lr":
                group["lr"] *= 0.8
            elif name == "betas" and "betas" in group:
                group["betas"] = (0.9 - 0.05 * step, 0.999 - 0.01 * step)


def compare(make, options, *, ranks, numbers):
    """Parameters after some steps of a module and of its twin in plain PyTorch."""
    model = mlp()
    twin = copy.deepcopy(model)
    optimizer, plain = make(model.parameters(), **options), make(twin.parameters(), **options)
    run = OneProcessRun(model, optimizer=optimizer, mesh=f"dp={ranks}", plan="zero2")
    for step in range(STEPS):
        batch = regression_batch(seed=step)
        for each in (optimizer, plain):
            schedule(each, step, numbers)
        run.step(batch)
        plain.zero_grad()
        twin(*batch).backward()
        plain.step()
    found = run.parameters()
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", sampled(FUNCTIONAL))
def test_steps_are_those_of_torch_under_a_schedule_of_the_learning_rate(name):
    compare(*FUNCTIONAL[name], ranks=1, numbers=["lr"])


@pytest.mark.parametrize("name", ["Adam", "AdamW amsgrad", "NAdam", "RAdam", "Adamax"])
def test_steps_are_those_of_torch_under_a_schedule_of_the_betas(name):
    make, options = FUNCTIONAL[name]
    model = mlp()
    functional = functionalize_optimizer(
        make(model.parameters(), **options), dict(model.named_parameters())
    )
    rule = next(iter(functional.rules.values()))
    assert {"betas.0", "betas.1"} <= set(rule.numbers)
    compare(make, options, ranks=1, numbers=["lr", "betas"])


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Rprop", "ASGD"])
def test_steps_on_uneven_shards_are_those_of_torch(name):
    compare(*FUNCTIONAL[name], ranks=3, numbers=["lr"])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_optimizer_that_is_no_tensor_arithmetic_is_refused_by_name(name):
    make, options = IMPOSSIBLE[name]
    model = mlp()
    optimizer = make(model.parameters(), **options)
    with pytest.raises(OptimizerError, match=f"{name}.step\\(\\) cannot be made functional"):
        functionalize_optimizer(optimizer, dict(model.named_parameters()))


def test_one_rule_serves_all_parameters_of_a_kind():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    functional = functionalize_optimizer(
        optim.AdamW(model.parameters()), dict(model.named_parameters())
    )
    assert len(functional.rules) == 2
    assert len(functional.group_of) == 10


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Rprop"])
def test_nothing_is_copied_but_what_is_returned(name):
    """Of a functional step nobody writes what it was given."""
    make, options = FUNCTIONAL[name]
    model = mlp()
    functional = functionalize_optimizer(
        make(model.parameters(), **options), dict(model.named_parameters())
    )
    for rule in functional.rules.values():
        graph = rule.graph.graph
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        assert {*copies} <= {*graph.output_node().all_input_nodes}


def test_numbers_of_a_group_are_told_from_switches():
    optimizer = optim.Adam(mlp().parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.9), amsgrad=True)
    numbers = group_numbers(optimizer.param_groups[0])
    assert numbers["lr"] == 0.5
    assert (numbers["betas.0"], numbers["betas.1"]) == (0.8, 0.9)
    assert "amsgrad" not in numbers and "params" not in numbers


def test_a_comparison_with_a_number_is_a_condition_that_must_go_on_holding():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.0)
    functional = functionalize_optimizer(optimizer, dict(model.named_parameters()))
    conditions = [c for rule in functional.rules.values() for c in rule.conditions]
    decay = [c for c in conditions if c.number == "weight_decay"]
    assert decay and all(c.holds(0.0) and not c.holds(0.1) for c in decay)


def test_a_state_that_the_first_gradient_defines_is_told_apart_from_a_constant():
    model = mlp(scaled=False)
    functional = functionalize_optimizer(
        optim.SGD(model.parameters(), lr=0.1, momentum=0.9), dict(model.named_parameters())
    )
    rule = next(iter(functional.rules.values()))
    assert rule.states["momentum_buffer"].fill is None
    assert rule.states[FIRST_STEP].fill == 1.0
    counters = SharedCounters()
    counters.cover(functional, dict(model.named_parameters()), {})
    assert counters.owner("first.weight", FIRST_STEP) == "group0"
    assert counters.owner("first.weight", "momentum_buffer") == "first.weight"


def test_an_optimizer_that_has_stepped_before_goes_on_from_its_states():
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    model(*regression_batch()).backward()
    optimizer.step()
    functional = functionalize_optimizer(optimizer, dict(model.named_parameters()))
    rule = functional.rule("first.weight", model.first.weight)
    assert {"step", "exp_avg", "exp_avg_sq"} == set(rule.states)


def test_tracing_leaves_the_optimizer_and_its_parameters_alone():
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.AdamW(model.parameters())
    functionalize_optimizer(optimizer, dict(model.named_parameters()))
    assert not optimizer.state
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
