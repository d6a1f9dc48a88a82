"""Predicted against measured: step time and peak memory of four models under three presets on gloo ranks.

    python benchmarks/predictions.py --json benchmarks/results/predictions.json

The machine is calibrated first (`stepgraph doctor --calibrate`); nothing is fitted to these models. All
cells of one number of ranks live in the same processes and take turns, a few steps each, round by round. A
step's time is the slower rank's. Other processes may use the machine: turns wait for a quiet moment, and
the measured figure is the median step of the third of a cell's turns in which others used least; how many
cores that was, and the median of all turns, stand beside it. Peak memory is the largest number of bytes in
tensors alive at once, counted operation by operation in a run of its own.

The C library's allocator is told to keep what it has (`KEEP_MEMORY`): left alone it returns memory to the
system at the end of some processes' steps and not of others', and page faults then make up to a third of a
step's time, which no model of the step can know.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tests.live_memory import LiveMemory
from torch import nn
from torch.nn import functional as F

from stepgraph import Engine
from stepgraph.api import models
from stepgraph.cli import launcher
from stepgraph.cli.calibrate import calibrate
from stepgraph.cost.calibration import HOST, calibration_file, machine, to_json
from stepgraph.pipeline import foresee
from stepgraph.runtime.batches import flatten_batch

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**34)}
PLANS = ("ddp", "zero1", "zero3")
STEPS, WARMUP = 4, 3  # of a turn; before the first
QUIET, PATIENCE = 0.15, 3.0  # cores that others may use; seconds to wait for that


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
        """The skip and the body."""
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


class Quiet:
    """How much of the machine other processes used, from Linux's own counters."""

    def __init__(self):
        self.unit = 1 / os.sysconf("SC_CLK_TCK")
        self.start()

    def busy(self):
        """CPU seconds of the whole machine so far."""
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        numbers = [int(field) for field in fields]
        return (sum(numbers) - numbers[3] - numbers[4]) * self.unit  # without idle and waiting

    def start(self):
        """Counts from now."""
        self.before = (self.busy(), time.process_time(), time.perf_counter())

    def others(self, own=None):
        """Cores that others kept busy since ``start``; ``own``: CPU seconds of all of our ranks."""
        busy, cpu, now = self.busy(), time.process_time(), time.perf_counter()
        own = cpu - self.before[1] if own is None else own
        return max(0.0, busy - self.before[0] - own) / (now - self.before[2])

    def wait(self, seconds):
        """Waits until others are quiet, but no longer than so many seconds."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.start()
            time.sleep(0.2)
            if self.others() < QUIET:
                return


def everyone(value):
    """Every rank's value."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
        self.turns = []

    def turn(self, quiet):
        """A few steps; the first finds another cell's data in the caches, and is not counted."""
        times = []
        quiet.wait(PATIENCE)
        everyone(None)
        quiet.start()
        cpu = time.process_time()
        for _ in range(STEPS + 1):
            start = time.perf_counter()
            self.engine.step(self.batch)
            times.append(time.perf_counter() - start)
        found = everyone((times[1:], time.process_time() - cpu))
        others = everyone(quiet.others(sum(own for _, own in found)))[0]
        slowest = [max(step) for step in zip(*(step for step, _ in found), strict=True)]
        self.turns.append((others, slowest))

    def quietest(self):
        """(median seconds of a step in the quietest third of the turns, cores that others used then)."""
        turns = sorted(self.turns)[: max(1, len(self.turns) // 3)]
        return statistics.median(t for _, times in turns for t in times), turns[-1][0]

    def live_bytes(self):
        """Largest number of bytes alive during a step."""
        leaves = flatten_batch(self.batch, torch.device("cpu"))
        step = self.engine._programs_of("step", leaves).programs["step"]
        with LiveMemory([*step.held(), *leaves.leaves]) as live:
            self.engine.step(self.batch)
        return live.peak


def run_rank(names, plans, lowering, rounds):
    """On every rank: the rows of all cells; those of the first rank are used."""
    torch.set_num_threads(1)
    cells = [Cell(name, plan, lowering) for name in names for plan in plans]
    quiet = Quiet()
    for index in range(rounds):
        for cell in cells[index % len(cells) :] + cells[: index % len(cells)]:
            cell.turn(quiet)
    rows = []
    for cell in cells:
        found = foresee(cell.engine.programs, machine(HOST), lowering)
        held = everyone(cell.live_bytes() if lowering == "eager" else 0)
        seconds, others = cell.quietest()
        row = dict(zip(("model", "plan"), cell.name, strict=True))
        row |= {"ranks": len(held), "lowering": lowering}
        row |= {"measured_ms": round(seconds * 1e3, 2), "predicted_ms": round(found.step_ms, 2)}
        row["time_error"] = round(found.step_ms / (seconds * 1e3) - 1, 4)
        row["others_used_cores"] = round(others, 3)
        whole = statistics.median(t for _, times in cell.turns for t in times)
        row["median_of_all_turns_ms"] = round(whole * 1e3, 2)
        row["compute_ms"] = round(found.compute_ms, 2)
        row["communication_ms"] = round(found.communication_ms, 2)
        if lowering == "eager":
            row |= {"measured_bytes": max(held), "predicted_bytes": found.peak_bytes}
            row["memory_error"] = round(found.peak_bytes / max(held) - 1, 4)
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
    table = Table(
        "model", "plan", "ranks", "lowering", "measured", "predicted", "error", "others", "memory"
    )
    for row in rows:
        memory = f"{row['memory_error']:+.1%}" if "memory_error" in row else "-"
        table.add_row(
            row["model"], row["plan"], str(row["ranks"]), row["lowering"],
            f"{row['measured_ms']:.1f} ms", f"{row['predicted_ms']:.1f} ms",
            f"{row['time_error']:+.1%}", f"{row['others_used_cores']:.2f}", memory,
        )  # fmt: skip
    Console(width=120).print(table)


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
    if any(name not in os.environ for name in KEEP_MEMORY):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    if not options.keep_calibration:
        quiet = Quiet()
        quiet.wait(10 * PATIENCE)
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
