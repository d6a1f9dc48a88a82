"""spell_out_norms: batch and group norm as sums, which a cut batch allows."""

import pytest
import torch
from torch import nn

from stepgraph.placement.passes.spell_out_norms import spell_out_norms
from stepgraph.planning.plan import preset_plan
from stepgraph.program.collectives import is_collective
from stepgraph.program.invariants import check_invariants
from stepgraph.runtime.ranks import parse_mesh
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import assert_golden, assert_summation, captured, values

aten = torch.ops.aten
FUSED = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm_backward.default,
}


class Normed(nn.Module):
    """A norm behind a product, and a scalar."""

    def __init__(self, norm):
        super().__init__()
        # A bias in front of a norm has no gradient but rounding noise.
        self.linear, self.norm = nn.Linear(4, 4, bias=False), norm

    def forward(self, x):
        x = self.linear(x.transpose(1, -1)).transpose(1, -1)
        return self.norm(x).pow(3).mean()


NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "batch, plain": lambda: nn.BatchNorm1d(4, affine=False),
    "batch, no buffers": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch, frozen": lambda: nn.BatchNorm2d(4).eval(),
    "group": lambda: nn.GroupNorm(2, 4),
    "group, plain": lambda: nn.GroupNorm(4, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance, with buffers": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
}


def example(name, rows=4):
    shape = (rows, 4, 6) if name in ("batch", "batch, plain") else (rows, 4, 3, 2)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_text_shows_sums():
    torch.manual_seed(0)
    program = captured(Normed(nn.BatchNorm1d(4)), example("batch"))
    after = spell_out_norms(program.copy(), parse_mesh("dp=2"))
    check_invariants(after)
    assert_golden(__file__, "spell_out_norms", program, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_results_are_the_same_up_to_summation(name, dtype):
    torch.manual_seed(0)
    model, x = Normed(NORMS[name]()).to(dtype), example(name).to(dtype)
    program = captured(model, x)
    after = spell_out_norms(program.copy(), parse_mesh("dp=2"))
    check_invariants(after)
    assert not any(node.target in FUSED for node in after.operations())
    inputs = values(model, x)
    assert_summation(inputs.execute(program), inputs.execute(after))


@pytest.mark.parametrize("mesh", ["dp=1", "tp=2"])
def test_where_no_ranks_share_a_batch_they_stay(mesh):
    program = captured(Normed(nn.BatchNorm1d(4)), example("batch"))
    assert str(spell_out_norms(program.copy(), parse_mesh(mesh))) == str(program)


@pytest.mark.parametrize(
    ("name", "plan"), sampled([(n, plan) for n in NORMS for plan in ("ddp", "zero3")], every=5)
)
def test_two_ranks_have_the_statistics_of_the_whole_batch(name, plan):
    """Losses, parameters and buffers of three steps; nothing larger than a weight travels."""

    def trained(mesh, plan):
        torch.manual_seed(0)
        model = Normed(NORMS[name]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = preset_plan(plan, parse_mesh(mesh), schedule="none")  # no two collectives are one
        run = OneProcessRun(
            model, loss=lambda m, b: m(b), optimizer=optimizer, mesh=mesh, plan=alone
        )
        losses = [run.step(example(name)).item() for _ in range(3)]
        state = {role: parts[0] for role, parts in run._state.items() if "Buffer" in str(role)}
        return losses, {**run.parameters(), **state}, run.programs["step"]

    losses, state, program = trained("dp=2", plan)
    expected, wanted, _ = trained("dp=1", "ddp")
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, value in wanted.items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
    moved = [node for node in program.operations() if is_collective(node)]
    assert max(node.meta["val"].numel() for node in moved) <= 16
