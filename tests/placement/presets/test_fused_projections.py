"""Queries, keys and values that one product makes: tensor parallelism divides them by heads."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from stepgraph.placement.presets import beside_data as policies
from stepgraph.program.layout import InnerShard
from tests.one_process import OneProcessRun
from tests.placement.presets.test_tensor_parallel import parameters_of, product_flops, step_of
from tests.sampling import sampled
from tests.support import captured, notes_of

WIDTH, HEADS, PARTS = 16, 4, 3


class Fused(nn.Module):
    """Attention with one projection for all three, and a gated layer with one for both."""

    def __init__(self, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, PARTS * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(24, WIDTH)

    def forward(self, x):
        heads = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).split(WIDTH, -1))
        q, k, v = (t.transpose(1, 2) for t in heads)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


def batch():
    return (torch.randn(4, 6, WIDTH),)


def trained(mesh, plan, **settings):
    torch.manual_seed(1)
    model, data = Fused(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = OneProcessRun(
        model, optimizer=optimizer, mesh=mesh, plan=plan, max_grad_norm=0.5, **settings
    )
    return [run.step(data).item() for _ in range(2)], run.parameters()


def test_each_rank_reads_a_slice_of_every_block():
    layout = policies.find_layout(captured(Fused(), *batch()), 2, 2, {})
    assert layout == {
        "qkv.weight": InnerShard(0, PARTS),
        "qkv.bias": InnerShard(0, PARTS),
        "out.weight": Shard(1),
        "gate_up.weight": InnerShard(0, 2),
        "down.weight": Shard(1),
    }


@pytest.mark.parametrize("mesh", sampled(["dp=2,tp=2", "tp=2"]))
def test_work_is_divided_and_the_weight_is_stored_whole(mesh):
    whole, _ = step_of(Fused(), batch(), "dp=1", "ddp")
    program, run = step_of(Fused(), batch(), mesh, "tp")
    assert product_flops(program) == product_flops(whole) / (4 if "dp" in mesh else 2)
    stored = parameters_of(program)
    assert all(isinstance(p, Replicate) for p in stored["qkv.weight"])
    assert stored["out.weight"][-1] == Shard(1)
    assert notes_of(run) == []


@pytest.mark.parametrize(
    ("mesh", "plan"),
    sampled(
        [
            (mesh, plan)
            for mesh in ("dp=2,tp=2", "tp=2,dp=2")
            for plan in ("tp+zero1", "tp+zero3", "tp+sp+ddp")
        ],
        every=5,
    ),
)
def test_training_is_that_of_one_process(mesh, plan):
    losses, expected = trained("dp=1", "ddp")
    got, parameters = trained(mesh, plan)
    assert got == pytest.approx(losses, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-7)


def test_heads_that_do_not_divide_leave_it_whole():
    layout = policies.find_layout(captured(Fused(), *batch()), 8, 1, {})
    assert "qkv.weight" not in layout and "out.weight" not in layout
    assert layout["gate_up.weight"] == InnerShard(0, 2)


def test_a_program_met_later_divides_what_is_stored_whole():
    program = captured(Fused(), *batch())
    found = policies.find_layout(program, 2, 1, {})
    stored = {n: Replicate() if isinstance(p, InnerShard) else p for n, p in found.items()}
    known = dict.fromkeys(dict(Fused().named_parameters()), Replicate()) | stored
    assert policies.find_layout(program, 2, 1, known) == found
