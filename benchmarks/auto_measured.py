"""``auto`` beside presets as they run: step time of six models of two sizes, on two gloo ranks.

    python benchmarks/auto_measured.py --json benchmarks/results/auto_measured.json

All engines of one model live in the same two processes, one thread each, and take turns round by round
behind a barrier, in a rotated order; a turn's time is that of the slower rank. A ratio is the median over
rounds of (auto's turn / the preset's turn); the best preset has the smallest median. ``again`` is
the best preset's ratio to the next best: where placements come to the same, it shows the spread. Calibrate
first (``stepgraph doctor --calibrate``), or the host's rough numbers count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")

import torch
import torch.distributed as dist
from torch import nn

RANKS, ROWS = 2, 4
PRESETS = ("ddp", "zero1", "zero3", "zero3-keep")
SIZES = {"small": (2, 64, 64), "medium": (4, 256, 128)}  # layers, width, tokens
NAMES = ("llama", "gpt2", "bert", "vit", "mlp", "conv")


class Regression(nn.Module):
    """A body, and the squared error of what it returns."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.body(x), y)


def build(name: str, size: str) -> tuple[nn.Module, Any]:
    """A model, the same on every rank, and the batch of all of them."""
    import transformers as hf

    layers, width, tokens = SIZES[size]
    torch.manual_seed(0)
    rows = ROWS * RANKS
    ids = torch.randint(256, (rows, tokens))
    text = {"input_ids": ids, "labels": ids}
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    match name:
        case "llama":
            config = hf.LlamaConfig(vocab_size=256, intermediate_size=11 * width // 4, **shape)
            return hf.LlamaForCausalLM(config), text
        case "gpt2":
            none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": tokens}
            return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=256, **sizes, **none)), text
        case "bert":
            config = hf.BertConfig(vocab_size=256, intermediate_size=4 * width, **shape, **still)
            return hf.BertForMaskedLM(config), text
        case "vit":
            seen = {"image_size": 32, "patch_size": 4, "num_labels": 10}
            config = hf.ViTConfig(intermediate_size=4 * width, **seen, **shape, **still)
            pixels, labels = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
            return hf.ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}
        case "mlp":
            parts = [m for _ in range(layers) for m in (nn.Linear(4 * width, 4 * width), nn.GELU())]
            x = torch.randn(rows * 16, 4 * width)
            return Regression(nn.Sequential(*parts)), (x, torch.randn_like(x))
    channels = width // 4
    parts = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(layers):
        parts += [nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
    body = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return Regression(body), (torch.randn(rows, 3, 32, 32), torch.randn(rows, 10))


def measured(name: str, size: str, lowering: str, rounds: int, steps: int) -> dict[str, Any]:
    """One rank: what turns took of auto and of every preset, in ms a step."""
    import stepgraph
    from stepgraph.torch_internals import pytree

    rank = int(os.environ["RANK"])
    engines, turns, found = {}, {}, {}
    for plan in ("auto", *PRESETS):
        model, batch = build(name, size)
        own = pytree.tree_map(lambda t: t.chunk(RANKS)[rank], batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        engine = stepgraph.Engine(model, optimizer=optimizer, plan=plan, lowering=lowering)
        for _ in range(3):
            engine.step(own)
        engines[plan], turns[plan] = (engine, own), []
    placed = engines["auto"][0].plan.decisions["step"].placement
    found["answer"] = placed.preset
    order = list(engines)
    for number in range(rounds):
        for plan in order[number % len(order) :] + order[: number % len(order)]:
            engine, own = engines[plan]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                engine.step(own).item()
            took = torch.tensor((time.perf_counter() - start) / steps * 1e3)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            turns[plan].append(took.item())
    return found | {"ms": turns}


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Medians, auto's ratio to the best preset, and that one's to the next."""
    medians = {plan: statistics.median(turns) for plan, turns in found["ms"].items()}
    best, second, *_ = sorted(PRESETS, key=medians.__getitem__)

    def ratio(a: str, b: str) -> float:
        pairs = zip(found["ms"][a], found["ms"][b], strict=True)
        return statistics.median(x / y for x, y in pairs)

    row = {"answer": found["answer"], "best_preset": best, "median_ms": medians}
    return row | {"auto_to_best": ratio("auto", best), "again": ratio(best, second)}


def main() -> None:
    """Measures in fresh pairs of processes, and prints a line for each model and size."""
    from stepgraph.cli.launcher import launch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--lowering", default="inductor")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for size in arguments.sizes.split(","):
        for name in arguments.models.split(","):
            told = (name, size, arguments.lowering, arguments.rounds, arguments.steps)
            first, *_ = launch(measured, *told, ranks=RANKS)
            results.append({"model": name, "size": size, "lowering": told[2], **compared(first)})
            print(json.dumps(results[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
