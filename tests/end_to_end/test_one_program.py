"""One Program on every device: of host, meta or CUDA tensors the plan is the same, and is fused on CUDA.

What a CUDA rank would run is propagated on fake tensors; nothing runs on a device here.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import stepgraph
from stepgraph import torch_internals
from stepgraph.capture.module import capture
from stepgraph.cost.devices import find_device
from stepgraph.lowering.graphs.obstacles import find_obstacles
from stepgraph.planning.target import target_of
from tests.beside import beside
from tests.end_to_end import many_models, models
from tests.end_to_end.models import ROWS, Brought
from tests.graphs.capturing import refusal
from tests.propagation import differences
from tests.sampling import sampled


class Recurrent(nn.Module):
    """An LSTM over a few steps."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.inner(x)[0]).square().mean()


class Noisy(nn.Module):
    """Noise on the way in, and islands in another type: one of the device, one that is full precision."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x):
        x = x + 0.1 * torch.randn_like(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            y = F.softmax(self.norm(self.first(x)), -1)
            with torch.autocast(x.device.type, enabled=False):
                y = y.float().cumsum(-1)
        return self.last(y.to(self.last.weight.dtype)).square().mean()


class Documents(nn.Module):
    """Attention within documents, as a mask of the batch, with a learned bias or without."""

    def __init__(self, learned):
        super().__init__()
        self.project = nn.Linear(16, 3 * models.WIDTH)
        self.bias = nn.Parameter(torch.zeros(4, 8, 8)) if learned else None

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1)
        )
        document = (x[..., 0] > 0).long().cumsum(1)
        same = (document[:, None, :, None] == document[:, None, None, :]).to(q.dtype)
        mask = (1 - same) * -1e4 if self.bias is None else self.bias - (1 - same) * 1e4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype)).square().mean()


class Flexible(nn.Module):
    """Soft caps, learned slopes and documents of the batch, as functions of scores and positions.

    Heads are as wide as torch's kernel wants them at least.
    """

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 3 * 64)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, 4))

    def heads(self, x):
        parts = self.project(x).chunk(3, dim=-1)
        return [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]

    def forward(self, x):
        document = (x[..., 0] > 0).long().cumsum(1)
        rows, length = x.shape[:2]
        slopes = self.slopes

        def capped(score, row, head, query, key):
            return 2 * torch.tanh(score / 2) + slopes[head] * (key - query)

        def same(row, head, query, key):
            return (document[row, query] == document[row, key]) & (query >= key)

        mask = create_block_mask(same, rows, None, length, length, device=x.device)
        found = flex_attention(*self.heads(x), score_mod=capped, block_mask=mask)
        return found.square().mean()

    def by_hand(self, x):
        query, key, value = self.heads(x)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        place = torch.arange(x.shape[1])
        away = place[None, :] - place[:, None]
        scores = 2 * torch.tanh(scores / 2) + self.slopes[:, None, None] * away
        document = (x[..., 0] > 0).long().cumsum(1)
        same = (document[:, None, :, None] == document[:, None, None, :]) & (away <= 0)
        shares = scores.masked_fill(~same, float("-inf")).softmax(-1)
        return (shares @ value).square().mean()


def _of_table(name):
    model, batch = many_models.make(name)
    return Brought(model, batch)


def _windowed():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=models.WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=models.WORDS, use_sliding_window=True,
        sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    ids = torch.randint(0, models.WORDS, (ROWS, models.TOKENS))
    return Brought(Qwen3ForCausalLM(config), {"input_ids": ids, "labels": ids.clone()})


def _of_rows(model, *shape):
    return Brought(model, torch.randn(ROWS, *shape), lambda m, batch: m(batch))


ZOO = {
    **models.MODELS,
    "qwen3, windowed": _windowed,
    "soft caps": lambda: _of_table("Gemma2"),
    "T5": lambda: _of_table("T5ForConditionalGeneration"),
    "a learned bias": lambda: _of_rows(Documents(learned=True), 8, 16),
    "soft caps, flex": lambda: _of_rows(Flexible(), 8, 16),
    "documents": lambda: _of_rows(Documents(learned=False), 8, 16),
    "LSTM": lambda: _of_rows(Recurrent(), 5, 8),
    "noise and islands": lambda: _of_rows(Noisy(), 8),
}
# Whose own code calls ``scaled_dot_product_attention`` or ``flex_attention``.
FUSED = {
    "llama", "qwen3", "qwen3, windowed", "gpt2", "bert", "vit", "mixtral", "whisper", "unet", "lora", "T5",
    "a learned bias", "documents", "soft caps, flex",
}  # fmt: skip
KINDS = [
    ("dp=4", "ddp", torch.bfloat16, "none"),
    ("dp=2,tp=2", "tp+sp+zero3", None, "full"),
]
MORE = [
    (mesh, preset, dtype, memory)
    for mesh, preset in (
        ("dp=4", "ddp"), ("dp=4", "zero3"), ("replicate=2,shard=2", "hsdp"),
        ("dp=2,tp=2", "tp+sp+zero3"), ("dp=2,tp=2", "auto"),
    )
    for dtype in (None, torch.bfloat16)
    for memory in ("none", "full")
]  # fmt: skip


@pytest.fixture(autouse=True)
def every_forward_is_compared(monkeypatch):
    """On the host and on fake CUDA tensors, whether or not its code names a device."""
    monkeypatch.setattr(
        "stepgraph.capture.module.asks_for_device", lambda codes, device_type: device_type != "cpu"
    )


@pytest.fixture(autouse=True)
def each_type_and_source_is_captured_once(monkeypatch):
    """Of the model at hand: placements, memory and meshes are decided on copies of one capture."""

    def shared(model, loss, batch, **how):
        key = (id(model), *sorted(how.items(), key=str))
        if key not in CAPTURED:
            CAPTURED[key] = (model, capture(model, loss, batch, **how))
        program, *others = CAPTURED[key][1]
        return program.copy(), *others

    monkeypatch.setattr("stepgraph.capture.step.capture", shared)


CAPTURED = {}


def bring(name):
    torch.manual_seed(0)
    return ZOO[name]()


@functools.lru_cache(maxsize=1)
def at_hand(name):
    """On the host."""
    CAPTURED.clear()
    return bring(name)


def planned(brought, mesh, preset, dtype, memory):
    return stepgraph.plan(
        brought.model, example=brought.batch, mesh=mesh, loss=brought.loss, placement=preset,
        memory=memory, compute_dtype=dtype,
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def elsewhere(name):
    """The model on the meta device, the batch on fake CUDA tensors."""
    batch = at_hand(name).batch
    with torch.device("meta"):
        brought = bring(name)
    with torch_internals.new_fake_mode():
        moved = pytree.tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), batch)
    return Brought(brought.model, moved, brought.loss)


def attentions(program):
    return [str(n.target) for n in program.operations() if "attention" in str(n.target)]


def check_plan(name, kind):
    brought = at_hand(name)
    plan = planned(brought, *kind)
    there = elsewhere(name)
    assert planned(there, *kind).decisions == plan.decisions
    programs = plan.programs(there.model, example=there.batch, loss=there.loss)
    assert plan.graph_obstacles == ()
    for program in programs.values():
        assert not differences(program, "cuda")
        assert not find_obstacles(program, target_of(find_device("h100")))
        assert refusal(program) is None
        found = attentions(program)
        assert bool(found) == (name in FUSED)
        assert not any("stepgraph.attention" in target for target in found)
        backwards = sum("backward" in target for target in found)
        recomputed = kind[3] == "full"
        assert backwards * 2 == len(found) or (recomputed and 0 < backwards * 2 < len(found))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft's, on the meta device
@pytest.mark.parametrize("name", sampled(ZOO, every=len(ZOO)))
def test_a_laptops_plan_is_the_clusters(name):
    check_plan(name, KINDS[list(ZOO).index(name) % len(KINDS)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("kind", MORE, ids=lambda k: f"{k[1]} {k[2]} {k[3]}")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ZOO]
)
def test_a_laptops_plan_is_the_clusters_whatever_is_asked(name, kind):
    check_plan(name, kind)


def trained_beside(make, loss, x):
    """An engine of a model, after steps that were those of its twin in plain PyTorch."""
    engine, _, steps = beside(make, x, loss, lr=0.1)
    steps(3)
    return engine


def test_a_recurrent_network_trains_on_the_host_as_plain_pytorch_does():
    trained_beside(Recurrent, Recurrent.forward, torch.randn(4, 5, 8))


def test_flex_attention_trains_on_the_host_as_it_would_by_hand():
    engine = trained_beside(Flexible, Flexible.by_hand, torch.randn(4, 8, 16))
    assert "no fallbacks" in engine.report()
