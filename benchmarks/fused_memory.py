"""What a compiled step holds at its peak beside what was predicted, counted by the allocator; one process.

    PYTHONPATH=. python benchmarks/fused_memory.py --json benchmarks/results/fused_memory.json

Bytes above what is held between steps (parameters, optimizer state, the batch) are those of the profiler's
memory events of one step on the host under inductor. ``operator by operator`` is the prediction as if every
operation wrote its result, as it is without a compiler.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.allocated_memory import allocated_peak, bytes_between_steps
from torch import Tensor, nn

import stepgraph
from stepgraph import pipeline
from stepgraph.cost.memory import memory_timeline

Batch = dict[str, Tensor]


class Classifier(nn.Module):
    """A body, a mean over what is left of an image, a linear head and a loss."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        found = self.body(x)
        rows = found.flatten(2).mean(2) if found.dim() > 2 else found
        return nn.functional.cross_entropy(self.head(rows), y)


def llama(width: int, layers: int, vocabulary: int, tokens: int = 512) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(vocabulary, (4, tokens))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def gpt2(layers: int, **rates: float) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=256, n_head=4, use_cache=False, **rates)
    ids = torch.randint(50257, (4, 256))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        num_labels=100, image_size=128,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(100, (8,))}
    return ViTForImageClassification(config), batch


def perceptron() -> tuple[nn.Module, Batch]:
    layers = [(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(6)]
    body = nn.Sequential(*[module for layer in layers for module in layer])
    return Classifier(body, 256), {"x": torch.randn(2048, 256), "y": torch.randint(10, (2048,))}


def convolutions() -> tuple[nn.Module, Batch]:
    widths = [(3, 32), (32, 64), (64, 128)]
    layers = [
        (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in widths
    ]
    body = nn.Sequential(*[module for layer in layers for module in layer])
    return Classifier(body, 128), {"x": torch.randn(32, 3, 64, 64), "y": torch.randint(10, (32,))}


class Gated(nn.Module):
    """Many steps of arithmetic, each read by several."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 512), nn.Linear(512, 64)
        self.weight = nn.Parameter(torch.ones(2, 512))

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        inside = self.enter(x)
        one, other = torch.sin(inside * self.weight[0]), torch.cos(inside * self.weight[1])
        both = one * other
        return x + self.leave(both * inside + both * one + other)


class Attention(nn.Module):
    """As written by hand, with dropout of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape: (batch, tokens, 64)."""
        batch, tokens, width = x.shape
        q, k, v = self.enter(x).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = nn.functional.dropout(
            (q @ k.transpose(-1, -2) / 4).softmax(-1), 0.1, self.training
        )
        return x + self.leave((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


def gated() -> tuple[nn.Module, Batch]:
    body = nn.Sequential(*[Gated() for _ in range(4)])
    return Classifier(body, 64), {"x": torch.randn(4096, 64), "y": torch.randint(10, (4096,))}


def attention() -> tuple[nn.Module, Batch]:
    body = nn.Sequential(*[Attention() for _ in range(3)], nn.Flatten())
    return Classifier(body, 256 * 64), {"x": torch.randn(4, 256, 64), "y": torch.randint(10, (4,))}


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "llama, a large vocabulary": lambda: llama(128, 2, 16000, 256),
    "llama, 4 layers": lambda: llama(256, 4, 1000),
    "llama, 12 layers": lambda: llama(128, 12, 1000),
    "gpt2": lambda: gpt2(3),
    "gpt2, no dropout": lambda: gpt2(3, **NO_DROPOUT),
    "gpt2, 12 layers": lambda: gpt2(12),
    "vit": vit,
    "perceptron": perceptron,
    "convolutions": convolutions,
    "many steps of arithmetic": gated,
    "attention by hand, dropout": attention,
    "attention by hand, dropout, full": attention,
}


def cell(name: str) -> dict[str, Any]:
    """One model: MiB above what is held between steps, and ratios of the whole."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = "full" if name.endswith(", full") else "none"
    asked: dict[str, Any] = {"memory": memory, "compute_dtype": None}
    plan = stepgraph.plan(
        model, example=batch, optimizer=optimizer,
        mesh="dp=1", placement="ddp", device="cpu", **asked,
    )  # fmt: skip
    programs = plan.programs(model, example=batch, optimizer=optimizer)
    step = pipeline.as_executed(programs, "inductor")["step"]
    predicted, one_by_one = (memory_timeline(step, fused).peak() for fused in (True, False))
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="ddp", **asked)
    for _ in range(3):
        engine.step(batch)
    measured = allocated_peak(lambda: engine.step(batch))
    kept = bytes_between_steps(model, optimizer, batch)
    return {
        "held between steps": kept / 2**20,
        "measured above": measured / 2**20,
        "predicted above": (predicted - kept) / 2**20,
        "predicted above, operator by operator": (one_by_one - kept) / 2**20,
        "predicted to measured": predicted / (kept + measured),
        "operator by operator to measured": one_by_one / (kept + measured),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=";".join(MODELS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"about": __doc__.split("\n\n")[-1], "torch": torch.__version__}
    for name in given.models.split(";"):
        found[name] = {key: round(value, 3) for key, value in cell(name).items()}
        print(name, found[name], flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
