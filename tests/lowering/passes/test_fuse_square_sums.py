"""fuse_square_sums: the squares of many gradients, which clipping adds up, by one operation."""

import functools

import pytest
import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.lowering.passes.fuse_square_sums import fuse_square_sums
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.operators.norms import SUM_OF_SQUARES
from stepgraph.program.text import program_text
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early
from tests.lowering.passes.written import written as written_by
from tests.support import (
    RANKS,
    assert_golden_text,
    assert_summation,
    bound,
    compiled,
    mlp,
    regression_batch,
    values,
)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Chain(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x.to(layer.weight.dtype))
        return x.square().mean()


written = functools.partial(written_by, fuse_square_sums)


def sums(program):
    return [node for node in program.operations() if node.target is SUM_OF_SQUARES]


def test_the_text_shows_one_sum_for_all_parameters():
    model = Chain(nn.Linear(3, 2))
    program = compiled(
        model, torch.ones(2, 3), sgd(model), ranks=2, plan="zero3", clip=True
    ).programs["step"]
    before, after = written(program)
    text = (
        f"{program_text(before[0], 'before')}\n{program_text(after[0], 'after fuse_square_sums')}"
    )
    assert_golden_text(__file__, "fuse_square_sums", text)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_a_step_is_the_same_within_rounding(plan, ranks):
    model, batch = mlp(), regression_batch()
    placed = compiled(model, batch, sgd(model), ranks=ranks, plan=plan, clip=True)
    before, after = written(placed.programs["step"], merge_small_collectives, update_early)
    for program in after:
        program.graph.lint()
        assert sums(program)
    inputs = values(model, batch, sgd(model), max_grad_norm=0.5)
    expected = inputs.execute(before, in_place=True)
    assert_summation(expected, inputs.execute(after, in_place=True))


def test_a_sum_does_not_wait_for_a_collective():
    torch.manual_seed(0)
    model = Chain(*(nn.Linear(4, 4) for _ in range(4)))
    placed = compiled(model, torch.randn(4, 4), sgd(model), ranks=2, plan="zero3", clip=True)
    placed = placed.programs["step"]
    before, (after, _) = written(placed)  # a reduction for each gradient

    def waits_before(program, wanted):
        nodes = list(program.operations())
        first = next(i for i, node in enumerate(nodes) if wanted(node))
        return sum(node.target is torch_internals.WAIT for node in nodes[:first])

    def squares(node):
        return node.target is torch.ops.aten.mul.Tensor and node.args[0] is node.args[1]

    first = waits_before(before[0], squares)
    fused = waits_before(after, lambda node: node.target is SUM_OF_SQUARES)
    assert fused == first or not sums(after)


def test_narrow_gradients_are_summed_in_single_precision():
    model = mlp().to(torch.bfloat16)
    batch = tuple(x.to(torch.bfloat16) for x in regression_batch())
    placed = compiled(model, batch, sgd(model), plan="ddp", clip=True).programs["step"]
    before, (after,) = written(placed)
    (fused,) = sums(after)
    assert fused.meta["val"].dtype == torch.float32
    assert {node.meta["val"].dtype for node in fused.args[0]} == {torch.bfloat16}
    inputs = values(model, batch, sgd(model), max_grad_norm=0.5)
    expected = inputs.execute(before, in_place=True)
    assert_summation(expected, inputs.execute([after], in_place=True))


def test_parameters_of_two_types_are_left_as_they_are():
    model = Chain(nn.Linear(4, 4), nn.Linear(4, 1).double())
    placed = compiled(model, torch.randn(4, 4), sgd(model), plan="ddp", clip=True).programs["step"]
    before, (after,) = written(placed)
    assert str(after) == str(before[0])


def test_what_a_model_squares_is_its_own():
    class Squares(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return (h * h).sum() + (x * x).sum() + (self.weight * self.weight).sum()

    model = Squares(3, 2)
    placed = compiled(model, torch.ones(2, 3), sgd(model), plan="ddp").programs["step"]
    before, (after,) = written(placed)
    assert str(after) == str(before[0])


def test_a_lowering_that_fuses_nothing_adds_one_by_one():
    model = mlp()
    placed = compiled(model, regression_batch(), sgd(model), plan="ddp", clip=True).programs["step"]
    (before,) = map(write_state_in_place, bound(placed))
    assert str(fuse_square_sums(before.copy(), fuses=False)) == str(before)
