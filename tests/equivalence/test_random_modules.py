"""Randomised programs: any small module trains on any mesh as it does in plain PyTorch.

Examples are drawn anew in the nightly profile (``STEPGRAPH_HYPOTHESIS=nightly``), and the same ones
every time otherwise.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from stepgraph.equivalence.one_process import OneProcessRun

RATE, STEPS, ROWS, LENGTH, WIDTH, VOCABULARY = 0.1, 2, 12, 4, 6, 11
# An example costs half a second, so the short profile does not look for a smaller one that fails too.
SHORT = {"max_examples": 15, "phases": [Phase.explicit, Phase.generate]}
PROFILE = {} if os.environ.get("STEPGRAPH_HYPOTHESIS") else SHORT

# ------------------------------------------------------------------------------------------ layers
#
# Each takes and returns (rows, length, width); sizes in between are odd, so that shards are uneven.


class Widen(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        y.add_(x)
        y.relu_()
        z = y * 2
        z[..., :3].mul_(0.5)
        return z


class Elementwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return torch.where(x > 0, x.sigmoid() * self.scale, x.clamp(-1, 1)) + self.shift


class Convolve(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Attend(nn.Module):
    """Attention of two heads, out of products and a softmax."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        heads = self.mix(x).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        score = torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, -1)
        return (score @ value).transpose(1, 2).reshape(rows, length, WIDTH)


class Fused(nn.Module):
    """The same with torch's own attention, and a causal mask."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x):
        query, key, value = self.mix(x).unsqueeze(1).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return y.squeeze(1)


class Fold(nn.Module):
    """Views that merge the batch with the positions, and a product on the result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x):
        rows, length, width = x.shape
        y = (x.reshape(rows * length, width) @ self.weight).view(rows, length, width)
        return y.flip(1) + y.transpose(1, 2).contiguous().view(rows, length, width)


class Centre(nn.Module):
    """Sums and means over dimensions that are not the batch."""

    def forward(self, x):
        return (
            x - x.mean((1, 2), keepdim=True) + x.sum(1, keepdim=True) / 7 + x.amax(2, keepdim=True)
        )


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


LAYERS = {
    "widen 5": lambda: Widen(5),
    "widen 9": lambda: Widen(9),
    "in place": InPlace,
    "elementwise": Elementwise,
    "convolve": Convolve,
    "attend": Attend,
    "fused": Fused,
    "fold": Fold,
    "centre": Centre,
    "norm": Normed,
}


class Model(nn.Module):
    def __init__(self, layers, embeds, reduction):
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, WIDTH) if embeds else nn.Linear(WIDTH, WIDTH)
        if embeds is None:
            self.first = nn.Identity()
        self.layers = nn.Sequential(
            *(Residual(LAYERS[name]()) if inside else LAYERS[name]() for name, inside in layers)
        )
        self.head = nn.Linear(WIDTH, 5)
        self.reduction = reduction

    def forward(self, x, y, weight):
        error = (self.head(self.layers(self.first(x))) - y).square()
        if self.reduction == "mean":
            return error.mean()
        if self.reduction == "sum":
            return error.sum() / 100
        return (error.mean(2) * weight).sum() / weight.sum().clamp(min=1)


def make_batch(embeds, seed):
    random = torch.Generator().manual_seed(seed)
    x = (
        torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
        if embeds
        else torch.randn(ROWS, LENGTH, WIDTH, generator=random)
    )
    y = torch.randn(ROWS, LENGTH, 5, generator=random)
    return x, y, (torch.rand(ROWS, LENGTH, generator=random) > 0.4).float()


def train_plainly(model, batches):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@settings(suppress_health_check=[HealthCheck.too_slow], **PROFILE)
@given(
    layers=st.lists(
        st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans()), min_size=1, max_size=4
    ),
    embeds=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "count"]),
    ranks=st.integers(1, 4),
    plan=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    memory=st.sampled_from(["none", "full"]),
    micro_batches=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_two_steps_of_a_random_module_are_those_of_plain_pytorch(
    layers, embeds, reduction, ranks, plan, memory, micro_batches, seed
):
    assume(ROWS % (ranks * micro_batches) == 0)
    check_two_steps(layers, embeds, reduction, ranks, plan, memory, micro_batches, seed)


@pytest.mark.parametrize("plan", ["ddp", "zero1"])
def test_a_gradient_that_an_operator_without_a_rule_made_whole_is_accumulated(plan):
    check_two_steps([("in place", True)], False, "sum", 2, plan, "none", 2, 0)


@pytest.mark.parametrize("layer", ["norm", "convolve"])
def test_a_first_layer_whose_input_needs_no_gradient_is_placed(layer):
    check_two_steps([(layer, False)], None, "sum", 2, "ddp", "none", 1, 0)


def check_two_steps(layers, embeds, reduction, ranks, plan, memory, micro_batches, seed):
    torch.manual_seed(seed)
    model = Model(layers, embeds, reduction)
    run = OneProcessRun(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        mesh=f"dp={ranks}",
        plan=plan,
        memory=memory,
        micro_batches=micro_batches,
    )
    batches = [make_batch(embeds, seed + step) for step in range(STEPS)]
    losses = [run.step(batch) for batch in batches]
    expected_losses, expected = train_plainly(model, batches)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
    found = run.parameters()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5, msg=name)
