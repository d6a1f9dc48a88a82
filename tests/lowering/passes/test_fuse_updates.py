"""fuse_updates: torch's fused kernel, for several parameters at once, where updates follow one another."""

import functools
from itertools import product

import pytest
import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.capture.module import default_loss
from stepgraph.capture.step import Source
from stepgraph.lowering.passes import fuse_updates as module
from stepgraph.lowering.passes.fuse_updates import fuse_updates
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.operators.updates import FUSED_ADAM, UPDATE
from stepgraph.pipeline import capture_of, make
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from stepgraph.program.driver import PassDriver
from stepgraph.program.text import program_text
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early
from tests.lowering.passes.written import written as written_by
from tests.sampling import sampled
from tests.support import (
    HOST,
    RANKS,
    adamw,
    assert_golden_text,
    assert_summation,
    bound,
    compiled,
    mlp,
    regression_batch,
    spec_of,
    tiny_llama,
    token_batch,
    values,
)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)


written = functools.partial(written_by, fuse_updates)


def count(program, target):
    return sum(node.target is target for node in program.operations())


def test_the_text_shows_one_call_for_all_parameters():
    class Sum(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    model = Sum(3, 2)
    program = compiled(model, torch.ones(2, 3), adamw(model), ranks=2, plan="zero1").programs[
        "step"
    ]
    before, after = written(program)
    text = f"{program_text(before[0], 'before')}\n{program_text(after[0], 'after fuse_updates')}"
    assert_golden_text(__file__, "fuse_updates", text)


@pytest.mark.parametrize(
    ("plan", "ranks", "optimizer"),
    sampled(list(product(["ddp", "zero1", "zero3"], RANKS, [adamw, adam])), every=3),
)
def test_a_step_is_the_same_within_rounding(plan, ranks, optimizer):
    model, batch = mlp(), regression_batch()
    optimizer = optimizer(model)
    placed = compiled(model, batch, optimizer, ranks=ranks, plan=plan, clip=True).programs["step"]
    before, after = written(placed, merge_small_collectives, update_early)
    for program in after:
        program.graph.lint()
        assert count(program, FUSED_ADAM) == 1
        # A parameter without dimensions is updated by numbers alone.
        assert count(program, UPDATE) == 0
    inputs = values(model, batch, optimizer, max_grad_norm=0.5)
    expected = inputs.execute(before, in_place=True)
    found = inputs.execute(after, in_place=True)
    assert roles.NewParam("first.weight") in expected.keys() & found.keys()
    assert_summation(expected, found)


def test_gradients_wait_where_that_does_not_raise_the_peak(monkeypatch):
    monkeypatch.setattr(module, "_HELD", 0)

    class Narrowing(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Narrowing(*(nn.Linear(n, n - 1) for n in range(48, 42, -1)))
    batch = torch.randn(2, 48)
    alone = compiled(model, batch, adamw(model), plan="ddp").programs["step"]
    _, (early,) = written(
        alone, update_early
    )  # one gradient at a time: held, they would be the peak
    assert count(early, FUSED_ADAM) > 4
    clipped = compiled(model, batch, adamw(model), plan="ddp", clip=True).programs["step"]
    _, (late,) = written(clipped, update_early)  # all of them wait for the norm
    assert count(late, FUSED_ADAM) == 1


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_the_updates_of_a_layer_are_one_call_on_ranks(plan):
    model, batch = tiny_llama(4), token_batch()
    optimizer = adamw(model)
    placed = compiled(model, batch, optimizer, ranks=2, plan=plan).programs["step"]
    before, after = written(placed, update_early)
    for program in after:
        calls = [len(n.args[0]) for n in program.operations() if n.target is FUSED_ADAM]
        assert calls == [1, *[len([*model.model.layers[0].parameters()])] * 4, 1, 1]
    inputs = values(model, batch, optimizer)
    expected = inputs.execute(before, in_place=True)
    assert_summation(expected, inputs.execute(after, in_place=True))


def test_clipping_is_done_within_the_call():
    model, batch = mlp(), regression_batch()
    placed = compiled(model, batch, adamw(model), plan="ddp", clip=True).programs["step"]
    _, (after,) = written(placed)
    (call,) = (node for node in after.operations() if node.target is FUSED_ADAM)
    assert call.args[-1].target is torch.ops.aten._to_copy.default  # the coefficient
    assert not [g for g in call.args[1] if g.target is torch.ops.aten.mul.Tensor]


class Swapped(torch.autograd.Function):
    """Of whose factors each is the other's gradient, in the same memory."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return b.view(-1), a.view(-1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_gradient_that_is_another_parameter_is_read_before_that_is_written():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(5)) for _ in range(2))

        def forward(self, x):
            return Swapped.apply(self.a, self.b) + 0 * x.sum()

    torch.manual_seed(0)
    model, batch = Product(), torch.ones(2)
    for clip in (False, True):
        placed = compiled(model, batch, adamw(model), plan="ddp", clip=clip).programs["step"]
        before, after = written(placed, update_early)
        given = {"max_grad_norm": 0.5} if clip else {}
        inputs = values(model, batch, adamw(model), **given)
        expected = inputs.execute(before, in_place=True)
        assert_summation(expected, inputs.execute(after, in_place=True))


def test_no_update_waits_for_a_collective():
    model, batch = mlp(), regression_batch()
    placed = compiled(model, batch, adamw(model), ranks=2, plan="zero3").programs["step"]
    before, after = written(placed, update_early)
    assert count(after[0], FUSED_ADAM) > 1

    def waits_before_the_first_update(program, target):
        nodes = list(program.operations())
        first = next(i for i, node in enumerate(nodes) if node.target is target)
        return sum(node.target is torch_internals.WAIT for node in nodes[:first])

    assert waits_before_the_first_update(before[0], UPDATE) == waits_before_the_first_update(
        after[0], FUSED_ADAM
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
        lambda model: torch.optim.AdamW(model.parameters(), maximize=True),
        lambda model: torch.optim.NAdam(model.parameters()),
    ],
)
def test_other_steps_stay_their_own_arithmetic(optimizer):
    model = mlp()
    placed = compiled(model, regression_batch(), optimizer(model), plan="ddp").programs["step"]
    _, after = written(placed)
    assert count(after[0], FUSED_ADAM) == 0
    assert count(after[0], UPDATE) == 3


def test_types_that_the_kernel_rounds_otherwise_stay_arithmetic():
    model = mlp().to(torch.bfloat16)
    batch = tuple(x.to(torch.bfloat16) for x in regression_batch())
    placed = compiled(model, batch, adamw(model), plan="ddp").programs["step"]
    _, after = written(placed)
    assert count(after[0], FUSED_ADAM) == 0


def test_a_lowering_that_fuses_nothing_runs_the_arithmetic():
    model = mlp()
    placed = compiled(model, regression_batch(), adamw(model), plan="ddp").programs["step"]
    (before,) = map(write_state_in_place, bound(placed))
    assert str(fuse_updates(before.copy(), fuses=False)) == str(before)


def test_views_of_what_is_new_stand_behind_the_call():
    model, batch = mlp(), regression_batch()
    optimizer = adamw(model)
    placed = compiled(model, batch, optimizer, ranks=2, plan="zero1").programs["step"]
    before, after = written(placed, merge_small_collectives, update_early)
    for program in after:
        program.graph.lint()
        known = {*program.placeholders}
        for node in program.operations():
            assert known.issuperset(node.all_input_nodes)
            known.add(node)
    inputs = values(model, batch, optimizer)
    expected = inputs.execute(before, in_place=True)
    assert_summation(expected, inputs.execute(after, in_place=True))


def test_the_split_use_is_fused_as_well():
    """Gradients are inputs there, which nobody writes."""
    model = mlp()
    source = Source(model, default_loss, spec_of(regression_batch()), adamw(model))
    for clip in (False, True):
        plan = preset_plan("ddp", parse_mesh("dp=1"), step=StepSettings("optimizer", clip=clip))
        names = [name for name, _ in model.named_parameters()]
        captured = capture_of(source, plan.request.step, PassDriver()).update(names)
        program = make(captured.programs, plan, HOST).programs["update"]
        after = fuse_updates(write_state_in_place(program), fuses=True)
        (call,) = (node for node in after.operations() if node.target is FUSED_ADAM)
        assert (call.args[-1] is not None) is clip
