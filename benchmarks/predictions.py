"""Predicted against measured: step time and peak memory of four models under three presets on gloo ranks.

    python benchmarks/predictions.py --json benchmarks/results/predictions.json

The machine is calibrated first (`stepgraph doctor --calibrate`); nothing is fitted to these models. All
cells of one number of ranks live in the same processes and take turns, a few steps each, round by round. A
step's time is the slower rank's; the measured figure is the lower quartile of all of a cell's steps, which
other work on the machine disturbs least; the median stands beside it. Peak memory is the largest number of
bytes in tensors alive at once, counted operation by operation in a run of its own.
"""

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from stepgraph import Engine
from stepgraph.cost.calibration import HOST, calibration_file, machine, to_json
from stepgraph.frontends import launcher, models
from stepgraph.frontends.calibrate import calibrate
from stepgraph.runtime.batches import flatten_batch
from stepgraph.runtime.forecast import forecast
from stepgraph.runtime.live_memory import LiveMemory

PLANS = ("ddp", "zero1", "zero3")
STEPS, WARMUP = 4, 3  # of a turn; before the first


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


def llama():
    """The command line's llama-tiny: 4 layers of width 192, 4 x 128 tokens."""
    ids = torch.randint(256, (4, 128))
    made = models.build_model("llama-tiny", 0)
    return made, {"input_ids": ids, "labels": ids.clone()}, models.language_model_loss


def gpt2():
    """4 layers of width 256, 4 x 128 tokens of 2,048, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=256, n_layer=4, n_head=4, vocab_size=2048, n_positions=128, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(2048, (4, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, None


def convolutional():
    """A small ResNet: 32 to 128 channels, 16 images of 32 x 32."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), Residual(32),
        nn.Conv2d(32, 64, 3, 2, 1), Residual(64), nn.Conv2d(64, 128, 3, 2, 1), Residual(128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    batch = {"x": torch.randn(16, 3, 32, 32), "y": torch.randint(10, (16,))}
    return model, batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])


def mlp():
    """Three wide layers, 256 rows."""
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024),
        nn.Linear(1024, 64),
    )  # fmt: skip
    batch = {"x": torch.randn(256, 256), "y": torch.randn(256, 64)}
    return model, batch, lambda m, b: F.mse_loss(m(b["x"]), b["y"])


MODELS = {"llama-tiny": llama, "gpt2": gpt2, "resnet": convolutional, "mlp": mlp}


class Cell:
    """One model under one preset on this rank."""

    def __init__(self, model, plan, lowering):
        self.name = (model, plan)
        torch.manual_seed(0)
        module, self.batch, loss = MODELS[model]()
        self.engine = Engine(
            module.train(),
            loss=loss,
            optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
            plan=plan,
            lowering=lowering,
        )
        for _ in range(WARMUP):
            self.engine.step(self.batch)
        self.times = []

    def turn(self, steps=STEPS):
        """A few steps; the first finds another cell's data in the caches, and is not counted."""
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            self.engine.step(self.batch)
            times.append(time.perf_counter() - start)
        self.times += times[1:]

    def live_bytes(self):
        """Largest number of bytes alive during a step."""
        leaves = flatten_batch(self.batch, torch.device("cpu"))
        step = self.engine._programs_of("step", leaves).programs["step"]
        held = [argument for argument in step.arguments if argument is not None]
        with LiveMemory([*held, *leaves.leaves]) as live:
            self.engine.step(self.batch)
        return live.peak


def run_rank(names, plans, lowering, rounds):
    """On every rank: the rows of all cells; those of the first rank are used."""
    torch.set_num_threads(1)
    cells = [Cell(name, plan, lowering) for name in names for plan in plans]
    for index in range(rounds):
        for cell in cells[index % len(cells) :] + cells[: index % len(cells)]:
            if dist.is_initialized():
                dist.barrier()
            cell.turn()
    rows = []
    for cell in cells:
        found = forecast(cell.engine.programs, machine(HOST), lowering)
        own = {"times": cell.times, "bytes": cell.live_bytes() if lowering == "eager" else None}
        everyone = [own]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
        times = [max(step) for step in zip(*(other["times"] for other in everyone), strict=True)]
        first, median, _ = statistics.quantiles(times, n=4)
        row = dict(zip(("model", "plan"), cell.name, strict=True))
        row |= {"ranks": len(everyone), "lowering": lowering, "steps": len(times)}
        row |= {"measured_ms": round(first * 1e3, 2), "median_ms": round(median * 1e3, 2)}
        row |= {"predicted_ms": round(found.step_ms, 2)}
        row["compute_ms"] = round(found.compute_ms, 2)
        row["communication_ms"] = round(found.communication_ms, 2)
        row["time_error"] = round(found.step_ms / (first * 1e3) - 1, 4)
        if own["bytes"]:
            peak = max(other["bytes"] for other in everyone)
            row |= {"measured_bytes": peak, "predicted_bytes": found.peak_bytes}
            row["memory_error"] = round(found.peak_bytes / peak - 1, 4)
        rows.append(row)
    return rows


def summary(rows):
    """The errors of a table, as numbers and as the line that plans print."""
    times = [abs(row["time_error"]) for row in rows]
    sizes = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    worst = max(rows, key=lambda row: abs(row["time_error"]))
    found = {
        "time_error_median": statistics.median(times),
        "time_error_worst": max(times),
        "time_worst_cell": [worst[key] for key in ("model", "plan", "ranks", "lowering")],
        "time_within_10_percent": sum(error <= 0.10 for error in times),
        "time_within_20_percent": sum(error <= 0.20 for error in times),
        "cells": len(rows),
        "memory_error_worst": max(sizes, default=None),
    }
    line = (
        f"step time within {found['time_error_median']:.0%} in half of {len(rows)} measured cells, "
        f"{found['time_error_worst']:.0%} in the worst; peak memory within "
        f"{found['memory_error_worst'] or 0:.1%} (benchmarks/predictions.py)"
    )
    return found, line


def show(rows):
    table = Table("model", "plan", "ranks", "lowering", "measured", "predicted", "error", "memory")
    for row in rows:
        memory = f"{row['memory_error']:+.1%}" if "memory_error" in row else "-"
        table.add_row(
            row["model"], row["plan"], str(row["ranks"]), row["lowering"],
            f"{row['measured_ms']:.1f} ms", f"{row['predicted_ms']:.1f} ms",
            f"{row['time_error']:+.1%}", memory,
        )  # fmt: skip
    Console(width=110).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--lowerings", default="eager")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep-calibration", action="store_true", help="use the file as it is")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.keep_calibration:
        calibrate(lambda name: print(f"measuring {name}", flush=True))
    names, plans = options.models.split(","), options.plans.split(",")
    rows = []
    for lowering in options.lowerings.split(","):
        for ranks in map(int, options.ranks.split(",")):
            print(f"{ranks} ranks, {lowering}", flush=True)
            rows += launcher.launch(run_rank, names, plans, lowering, options.rounds, ranks=ranks)[
                0
            ]
    show(rows)
    found, line = summary(rows)
    print(line)
    calibration_file().write_text(to_json({HOST: replace(machine(HOST), error=line)}))
    if options.json:
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread a rank",
        }
        text = {"about": about, "summary": found, "rows": rows}
        text["calibration"] = json.loads(calibration_file().read_text())["devices"][HOST]
        options.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
