"""How good ``auto`` is: its predicted step beside every preset's, by model, ranks and mesh.

    python benchmarks/plan_quality.py [--ranks 8,64] [--json benchmarks/results/plan_quality.json]

One capture serves all plans of one global batch. A preset that does not fit the device's memory is shown,
and not compared. ``auto`` takes a preset's answer where that is cheaper: ``answer`` says whose. Models
have few layers, which costs neither side anything: layers repeat. Of deep ones, which ``auto`` compares by
steps of few layers first, there are some more (``--deep``).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from stepgraph.api.models import BUILT_IN, build_model, language_model_loss
from stepgraph.api.planner import Planner, make_optimizer
from stepgraph.cost.devices import find_device
from stepgraph.errors import StepgraphError
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.runtime.ranks import parse_mesh

LAYERS = 4
# Where the certified gap was largest once: three layers.
THREE = (("llama3-8b", "dp=4,tp=2"), ("llama3-8b", "dp=16,tp=4"))
# With all their layers.
DEEP = (
    ("llama3-8b", "dp=64", 32),
    ("llama3-8b", "dp=16,tp=8", 32),
    ("gpt2", "dp=64", 12),
    ("qwen3-0.6b", "dp=16,tp=8", 28),
)
MODELS = {
    "llama3-8b": 8192,
    "qwen3-0.6b": 4096,
    "gpt2": 1024,
    "llama3-70b": 8192,
    "llama3-405b": 8192,
}
PRESETS = (
    "ddp", "zero1", "zero3-keep", "zero3", "tp+ddp", "tp+zero1", "tp+zero3-keep", "tp+zero3", "tp+sp+ddp",
    "tp+sp+zero3", "hsdp", "tp+hsdp", "tp+sp+hsdp",
)  # fmt: skip


def meshes(ranks: int) -> list[str]:
    """One to three dimensions."""
    tensor = 8 if ranks > 8 else 4
    data = ranks // tensor
    return [f"dp={ranks}", f"dp={data},tp={tensor}", f"replicate=2,shard={data // 2},tp={tensor}"]


def main() -> None:
    """Plans everything and prints a line for each model and mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="8,64,128,512")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--memory", default="full")
    parser.add_argument("--deep", action="store_true", help="The deep ones alone.")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    done = {(row["model"], row["mesh"], row.get("layers", LAYERS)) for row in results}
    end = time.monotonic() + 60 * arguments.minutes
    cells = [
        (model, mesh, LAYERS)
        for ranks in map(int, filter(None, arguments.ranks.split(",")))
        for model in arguments.models.split(",")
        for mesh in meshes(ranks)
    ]
    cells += [(model, mesh, 3) for model, mesh in THREE]
    for cell in DEEP if arguments.deep else cells:
        if cell in done or time.monotonic() > end:
            continue
        results.append(compare(*cell, arguments.memory))
        print(json.dumps(results[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(model: str, mesh: str, layers: int, memory: str) -> dict[str, Any]:
    """Every preset that the mesh has dimensions for, and ``auto``."""
    shape = parse_mesh(mesh)
    config = BUILT_IN[model]
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    with torch.device("meta"):
        module = build_model(model, 0).train()
    ids = torch.empty(2 * shape.data_size, MODELS[model], dtype=torch.long, device="meta")
    device = find_device("h100")
    planner = Planner(
        module,
        {"input_ids": ids, "labels": ids},
        language_model_loss,
        make_optimizer("adamw", module),
        device,
        StepSettings("adamw", precision=Precision(torch.bfloat16)),
    )
    row: dict[str, Any] = {"model": model, "mesh": mesh, "layers": layers, "memory": memory}
    row["plans"] = {}
    for name in (*PRESETS, "auto"):
        started = time.process_time()
        try:
            attempt = planner.plan(shape, name, memory)
        except StepgraphError:
            continue  # the mesh lacks a dimension of this preset
        predicted = attempt.plan.predicted
        assert predicted is not None
        row["plans"][name] = {
            "step_ms": predicted.step_ms,
            "peak_gib": predicted.peak_bytes / 2**30,
            "fits": attempt.fits,
            "answer": attempt.plan.decisions["step"].placement.preset,
            "gap": predicted.optimality_gap,
            "cpu_s": time.process_time() - started,
        }
    fitting = {n: p["step_ms"] for n, p in row["plans"].items() if n != "auto" and p["fits"]}
    if fitting and "auto" in row["plans"]:
        best = min(fitting, key=fitting.__getitem__)
        row["best_preset"] = best
        row["auto_to_best"] = row["plans"]["auto"]["step_ms"] / fitting[best]
    return row


if __name__ == "__main__":
    main()
