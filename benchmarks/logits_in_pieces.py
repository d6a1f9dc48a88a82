"""What a head of 128,256 words takes: logits whole, in pieces, and torch's own ``linear_cross_entropy``.

    python benchmarks/logits_in_pieces.py [--rounds 3] [--json benchmarks/results/logits_in_pieces.json]

A small model with a large vocabulary takes steps (SGD, float32) in a process of its own for each way to run
it: under ``memory="none"`` and two budgets, by the eager and the inductor lowering; plain PyTorch, with
``F.cross_entropy`` and with ``F.linear_cross_entropy`` (chunks as it chooses them) written into the model.
Its peak is what Linux says the process had resident at most in a step, over what it had before the first
one; the predicted one is that of the plan, less what was there before. Processes are run in turns, several
times: the best times count, and the loss of each is that of the first to float32 summation error. ``in
turns``: steps in pieces and of the whole in one process, one after the other; the median of pairs' ratios.
Peaks are those of other processes, where the C library gives all that is large back to the system at once
(``MALLOC_MMAP_THRESHOLD_``): it keeps blocks of less than 32 MiB otherwise, in pieces, up to gigabytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stepgraph.api.engine import Engine
from stepgraph.cost.memory import memory_timeline
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.pipeline import as_executed

WORDS, WIDTH, ROWS, LENGTH = 128_256, 256, 4, 512
STEPS, PAIRS = 3, 11
MEMORY = {"whole": "none", "in pieces": "budget:1.5GiB", "in small pieces": "budget:440MiB"}
PEAKS = ("peak_mib", "kept_mib")
WAYS = (
    "eager, whole", "eager, in pieces",
    "inductor, whole", "inductor, in pieces", "inductor, in small pieces",
    "plain, cross_entropy", "plain, linear_cross_entropy",
)  # fmt: skip


class Words(nn.Module):
    """Embedding, two layers and a head; ``apart``: product and loss are one call of torch."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.apart = apart

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of the labels."""
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if self.apart:
            options = torch.nn.LinearCrossEntropyOptions()
            rows = hidden.flatten(0, 1)
            return F.linear_cross_entropy(rows, self.head.weight, labels.flatten(), options=options)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def make(way: str) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """A model, the same for each way, its optimizer, and a batch."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = Words(apart=way.endswith("linear_cross_entropy"))
    random = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, WORDS, (ROWS, LENGTH), generator=random) for _ in range(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (tokens, labels)


def engine_of(way: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    """The engine of a way that has one."""
    lowering, how = way.split(", ")
    return Engine(
        model, loss=lambda model, batch: model(*batch), optimizer=optimizer, mesh="dp=1",
        plan="ddp", memory=MEMORY[how], lowering=lowering,
    )  # fmt: skip


def in_turns(lowering: str) -> dict[str, Any]:
    """Steps in pieces and steps of the whole, in this process one after the other: the ratios of pairs."""
    engines, batch = [], None
    for how in ("in pieces", "whole"):
        model, optimizer, batch = make(way := f"{lowering}, {how}")
        engines.append(engine_of(way, model, optimizer))
        engines[-1].step(batch)  # compiles
    ratios = []
    for number in range(PAIRS):
        seconds = {}
        for engine in engines[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            engine.step(batch).item()
            seconds[engine] = time.perf_counter() - start
        ratios.append(seconds[engines[0]] / seconds[engines[1]])
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def measure(way: str) -> dict[str, Any]:
    """One way, in this process."""
    model, optimizer, (tokens, labels) = make(way)
    row: dict[str, Any] = {"way": way}
    if way.startswith("plain"):

        def step() -> float:
            optimizer.zero_grad()
            loss = model(tokens, labels)
            loss.backward()
            optimizer.step()
            return loss.item()

    else:
        engine = engine_of(way, model, optimizer)

        def step() -> float:
            return engine.step((tokens, labels)).item()

    before = resident("VmRSS")
    row["losses"] = [step()]  # compiles
    gc.collect()
    if not way.startswith("plain"):
        decided = next(iter(engine.plan.decisions.values()))
        row["pieces"] = dict(decided.memory.pieces or {})
        (program,) = as_executed(engine.programs, engine.plan.lowering).values()
        line = memory_timeline(program, LOWERINGS[engine.plan.lowering].fuses)
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        row["predicted_mib"] = (line.peak() - held) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        row["losses"].append(step())
        times.append(time.perf_counter() - start)
    row["step_s"], row["peak_mib"] = min(times), resident("VmHWM") - before
    row["kept_mib"] = resident("VmRSS") - before
    return row


def resident(what: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the most so far) of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) / 2**10


def run(way: str, **environment: str) -> dict[str, Any]:
    """One way, in a process of its own."""
    command = [sys.executable, __file__, "--way", way]
    known = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=known)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs every way in turns, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        lowering, _, how = arguments.way.partition(", ")
        row = in_turns(lowering) if how == "in turns" else measure(arguments.way)
        print(json.dumps(row))
        return
    sizes = {"words": WORDS, "width": WIDTH, "tokens": ROWS * LENGTH, "memory": MEMORY}
    result: dict[str, Any] = {"torch": torch.__version__, **sizes}
    rows: dict[str, dict[str, Any]] = {}
    turns = result["in turns"] = {}
    for lowering in ("eager", "inductor"):
        turns[lowering] = run(f"{lowering}, in turns")
        print(f"{lowering}, in turns: {turns[lowering]['ratio']:.3f} of the whole", flush=True)
    for _ in range(arguments.rounds):
        for way in arguments.ways.split(";"):
            row, held = run(way), run(way, MALLOC_MMAP_THRESHOLD_=str(256 * 2**10))
            best = rows.setdefault(way, row | {key: held[key] for key in PEAKS})
            best["step_s"] = min(best["step_s"], row["step_s"])
            best["peak_mib"] = max(best["peak_mib"], held["peak_mib"])
            print(show(best), flush=True)
            if arguments.json:
                text = json.dumps(result | {"rows": [*rows.values()]}, indent=1)
                arguments.json.write_text(text + "\n")


def show(row: dict[str, Any]) -> str:
    """One way on a line."""
    predicted = row.get("predicted_mib")
    said = "" if predicted is None else f", predicted {predicted:7.0f}"
    return (
        f"{row['way']:28} {row['step_s']:6.2f} s  peak {row['peak_mib']:7.0f} MiB{said}"
        f"  loss {row['losses'][-1]:.6f}  {row.get('pieces') or ''}"
    )


if __name__ == "__main__":
    main()
