"""choose_attention_kernels: on every device the fused kernel where there is one, and the same values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from stepgraph.capture.passes.draw_seed import draw_seed
from stepgraph.capture.passes.key_random_operations import key_random_operations
from stepgraph.lowering.passes.choose_attention_kernels import (
    DRAWN_INSIDE,
    QUADRATIC,
    choose_attention_kernels,
)
from stepgraph.lowering.passes.move_to_target import move_to_target
from stepgraph.planning.target import Target, usual_target
from stepgraph.program import roles
from tests.graph_support import graph_program
from tests.propagation import differences
from tests.support import assert_golden, assert_golden_text, assert_summation, captured, values

HOST = usual_target("cpu")
CUDA = Target("cuda", 2, True, 2**20)


class Attending(nn.Module):
    """Self-attention of a kind, over ``[rows, 6, 4 heads x 8]``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.zeros(1, 4, 6, 6))

    def forward(self, x):
        q = self.project(x).unflatten(-1, (4, -1)).transpose(1, 2)
        few = q[:, :2] if self.kind == "groups of heads" else q
        mask = {
            "padded": x[:, None, None, :, 0] > -0.5, "bias": self.bias, "drawn": None,
        }.get(self.kind)  # fmt: skip
        y = F.scaled_dot_product_attention(
            q, few, few[..., :5] if self.kind == "narrow values" else few, attn_mask=mask,
            dropout_p=0.5 if self.kind == "drawn" else 0.0, is_causal=self.kind == "causal",
            enable_gqa=few is not q,
        )  # fmt: skip
        return y.square().sum() + self.bias.sum()


def program_of(kind, dtype=None):
    torch.manual_seed(0)
    model, batch = Attending(kind), torch.randn(2, 6, 32)
    return model, batch, key_random_operations(captured(model, batch, compute_dtype=dtype))


KINDS = ["plain", "causal", "padded", "bias", "drawn", "groups of heads", "narrow values"]
SPELT = {"bias", "drawn", "narrow values"}  # on hosts


def attentions(program):
    return [str(n.target) for n in program.operations() if "attention" in str(n.target)]


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_host_values_stay(kind):
    model, batch, program = program_of(kind)
    after = choose_attention_kernels(program.copy(), HOST)
    assert len(attentions(after)) == (0 if kind in SPELT else 2)
    assert not any("stepgraph.attention" in name for name in attentions(after))
    inputs = values(model, batch)
    assert_summation(inputs.execute(program), inputs.execute(after))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_a_fused_kernel_forward_and_backward(kind, dtype):
    program = move_to_target(program_of(kind, dtype)[2], CUDA)
    after = choose_attention_kernels(program, CUDA)
    flash = dtype is not None and kind in {"plain", "causal", "groups of heads", "drawn"}
    kernel = "flash" if flash else "efficient"
    forward, backward = attentions(after)
    drawn = "stepgraph.keyed_attention.default"
    assert forward == (
        drawn if kind == "drawn" else f"aten._scaled_dot_product_{kernel}_attention.default"
    )
    assert backward == f"aten._scaled_dot_product_{kernel}_attention_backward.default"
    assert not differences(after, "cuda")
    assert (roles.HostSeed() in after.inputs) == (kind == "drawn") == (DRAWN_INSIDE in after.notes)


def test_a_drawn_programs_text_has_the_seed():
    program = choose_attention_kernels(move_to_target(program_of("drawn")[2], CUDA), CUDA)
    assert "hostseed: i64[]" in str(program)


def test_strict_spells_a_dropout_out_and_says_so():
    program = move_to_target(program_of("drawn")[2], CUDA)
    after = choose_attention_kernels(program, CUDA, strict=True)
    assert not attentions(after)
    assert QUADRATIC.format("model") in after.notes or any("fused" in n for n in after.notes)
    assert not differences(after, "cuda")


def test_a_graph_that_draws_its_own_seed_draws_one_on_the_host_another_on_each_rank():
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum()

    drawn = []
    for rank in (0, 1):
        program = graph_program(attend, torch.randn(2, 4, 8, 16, requires_grad=True))
        program = draw_seed(key_random_operations(program), rank=rank)
        after = choose_attention_kernels(move_to_target(program, CUDA), CUDA, rank=rank)
        (node,) = [n for n in after.operations() if "keyed" in str(n.target)]
        seed = node.args[8]
        assert seed.meta["val"].device.type == "cpu" and not seed.meta["val"].dim()
        assert seed.args[0].target is torch.ops.aten.randint.low
        assert roles.HostSeed() not in after.inputs and not differences(after, "cuda")
        drawn.append(seed.args[1])
    assert drawn[0] != drawn[1]


def test_what_no_kernel_takes_is_spelt_out_and_said():
    program = move_to_target(program_of("plain", torch.float64)[2], CUDA)
    after = choose_attention_kernels(program, CUDA)
    assert not attentions(after) and any("no fused kernel" in note for note in after.notes)


def test_golden():
    program = move_to_target(program_of("padded", torch.bfloat16)[2], CUDA)
    after = choose_attention_kernels(program.copy(), CUDA)
    assert_golden(__file__, "choose_attention_kernels", program, after)


# ------------------------------------------------------------------------------ scores of functions


class Capped(nn.Module):
    """Soft caps and slopes that learn, over ``[rows, 6, 2 heads x width]``."""

    def __init__(self, width=16, twice=False):
        super().__init__()
        self.project = nn.Linear(8, 2 * width)
        self.slopes = nn.Parameter(torch.ones(2))
        self.twice = twice

    def forward(self, x):
        slopes, twice = self.slopes, self.twice

        def capped(score, row, head, query, key):
            score = 2 * torch.tanh(score / 2) + slopes[head] * (key - query)
            return score - slopes[head] if twice else score

        q = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return flex_attention(q, q, q, score_mod=capped).square().sum()


def flexible_program(width=16, dtype=None, twice=False):
    torch.manual_seed(0)
    model, batch = Capped(width, twice), torch.randn(2, 6, 8)
    return model, batch, captured(model, batch, compute_dtype=dtype)


def scores(program):
    """Shapes of values that are as large as the scores, [2, 2, 6, 6], or a mask of them."""
    shapes = [n.meta["val"].shape for n in program.operations() if hasattr(n.meta["val"], "shape")]
    return [shape for shape in shapes if tuple(shape[-2:]) == (6, 6)]


def test_flex_attention_is_spelt_out_on_hosts():
    model, batch, program = flexible_program()
    after = choose_attention_kernels(program.copy(), HOST)
    assert attentions(program) and not attentions(after) and scores(after)
    inputs = values(model, batch)
    assert_summation(inputs.execute(program), inputs.execute(after))
    assert not any("scores" in note for note in after.notes)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_flex_attention_is_itself_on_cuda_and_holds_no_scores(dtype):
    after = choose_attention_kernels(move_to_target(flexible_program(dtype=dtype)[2], CUDA), CUDA)
    forward, backward = attentions(after)
    assert forward == "stepgraph.flex_attention.default"
    assert backward == "stepgraph.flex_attention_backward.default"
    assert not differences(after, "cuda") and not scores(after) and not after.notes


@pytest.mark.parametrize(
    ("how", "left"),
    [({"width": 8}, 0), ({"dtype": torch.float64}, 0), ({"twice": True}, 1)],
    ids=["narrow heads", "double precision", "slopes that are read twice"],
)
def test_what_torchs_kernel_does_not_take_is_spelt_out_and_said(how, left):
    program = move_to_target(flexible_program(**how)[2], CUDA)
    after = choose_attention_kernels(program, CUDA)
    assert len(attentions(after)) == left and any("no fused kernel" in n for n in after.notes)
    assert not differences(after, "cuda")


def test_golden_of_flex_attention_on_cuda():
    program = move_to_target(flexible_program(dtype=torch.bfloat16)[2], CUDA)
    after = choose_attention_kernels(program, CUDA)
    assert_golden_text(__file__, "choose_attention_kernels_flex", str(after))
