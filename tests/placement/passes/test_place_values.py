"""place_values: one rank's own program, with every collective in it."""

import pytest
import torch
from torch import nn

from stepgraph.placement.passes.place_values import place_values
from stepgraph.placement.presets.data_parallel import PRESETS
from stepgraph.placement.presets.named import decide_by_preset
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.program.invariants import check_invariants
from stepgraph.runtime.ranks import parse_mesh
from tests.sampling import sampled
from tests.support import (
    RANKS,
    adamw,
    assert_golden,
    assert_summation,
    captured,
    compiled,
    mlp,
    observed_pass,
    regression_batch,
    tiny_llama,
    token_batch,
    values,
)


@pytest.fixture(scope="module")
def step():
    """Model, batch, optimizer and the step before it is placed."""
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    before, _, _ = observed_pass("place_values", model=model, batch=batch, optimizer=optimizer)
    return model, batch, optimizer, before


@pytest.fixture(scope="module")
def transformer():
    model, batch = tiny_llama(), token_batch()
    optimizer = adamw(model)
    before, _, _ = observed_pass("place_values", model=model, batch=batch, optimizer=optimizer)
    return model, batch, optimizer, before


def placed(program, preset, ranks):
    hybrid = f"replicate={min(ranks, 2)},shard={ranks}"
    mesh = parse_mesh(hybrid if preset == "hsdp" else f"dp={ranks}")
    after = place_values(program.copy(), decide_by_preset(program, mesh, preset), mesh)
    check_invariants(after, "place_values")
    return after


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x):
        return self.linear(x).square().mean()


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_the_text_shows_placements_and_collectives(preset):
    model = Linear()
    before, after, _ = observed_pass(
        "place_values",
        model=model,
        batch=torch.ones(4, 3),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ranks=2,
        plan=preset,
    )
    assert_golden(__file__, f"place_values_{preset}", before, after)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_result_is_that_of_one_process(step, preset, ranks):
    model, batch, optimizer, before = step
    inputs = values(model, batch, optimizer)
    assert_summation(inputs.execute(before), inputs.execute(placed(before, preset, ranks)))


@pytest.mark.parametrize(
    ("preset", "ranks"), sampled([("ddp", 3), ("ddp", 2), ("zero3", 3), ("zero3", 2)])
)
def test_every_result_of_a_transformer_is_that_of_one_process(transformer, preset, ranks):
    model, batch, optimizer, before = transformer
    inputs = values(model, batch, optimizer)
    assert_summation(inputs.execute(before), inputs.execute(placed(before, preset, ranks)))


@pytest.mark.parametrize("preset", PRESETS)
def test_on_one_rank_nothing_is_communicated(step, preset):
    _, _, _, before = step
    assert not any(is_collective(node) for node in placed(before, preset, 1).operations())


def test_a_batch_that_does_not_divide_is_worked_on_whole_by_every_rank():
    model, batch = mlp(), regression_batch(rows=5)
    before, _, _ = observed_pass("place_values", model=model, batch=batch)
    inputs = values(model, batch)
    assert_summation(inputs.execute(before), inputs.execute(placed(before, "zero3", 2)))


def test_an_operator_without_a_rule_is_replicated_and_reported():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return (torch.cumsum(torch.flip(self.linear(x), [0]), 0)).square().mean()

    model, batch = Sorted(), torch.randn(4, 3)
    before, _, _ = observed_pass("place_values", model=model, batch=batch)
    inputs = values(model, batch)
    after = placed(before, "ddp", 2)
    assert_summation(inputs.execute(before), inputs.execute(after))


def test_evaluation_returns_whole_outputs():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            y = self.linear(x)
            return {"features": y, "mean": y.mean()}

    model, batch = Features(), torch.randn(4, 3)
    program = captured(model, batch, loss=lambda m, x: m(x), training=False)
    after = placed(program, "zero3", 2)
    assert all(isinstance(role, roles.UserOutput) for role in after.outputs)
    inputs = values(model, batch)
    assert_summation(inputs.execute(program), inputs.execute(after))


def test_a_buffer_that_the_forward_writes_is_the_same_on_every_rank():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.seen.add_(1)
            self.total.add_(x.sum(0))
            return self.linear(x).mean()

    model, batch = Counting(), torch.randn(4, 3)
    before, _, _ = observed_pass("place_values", model=model, batch=batch)
    inputs = values(model, batch)
    expected = inputs.execute(before)
    assert roles.NewBuffer("total") in expected
    assert_summation(expected, inputs.execute(placed(before, "zero3", 2)))


def test_the_gradient_of_a_sum_does_not_make_every_rank_work_on_the_whole_batch():
    """It is a constant of the batch's shape, which nothing cuts by itself."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))

    def products(ranks):
        made = compiled(Summed(model), (torch.ones(8, 6),), ranks=ranks, plan="ddp")
        step = made.programs["step"]
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        found = [n for n in step.operations() if n.target in products]
        return sum(2 * n.meta["val"].numel() * n.args[-2].meta["val"].shape[1] for n in found)

    assert products(2) == products(1) // 2


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_of_a_sum_whose_second_dimension_is_the_batch_stays_there(plan, ranks):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    made = compiled(Turned(model), (torch.ones(8, 6),), ranks=ranks, plan=plan)
    sent = [str(node.target) for node in made.programs["step"].operations()]
    assert not any("all_to_all" in target for target in sent)


class Turned(torch.nn.Module):
    """A loss over [features, rows]."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return (self.model(x).t() * torch.arange(4.0)[:, None]).sum()


class Summed(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).sum()
