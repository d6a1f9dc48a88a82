"""What a memory budget gains over the named policies, and what it takes to find out.

    python benchmarks/memory_budgets.py [--models gpt2] [--json benchmarks/results/memory_budgets.json]

Each model's step is placed by a preset (bf16 compute, AdamW, an H100 model). At eight budgets from the
smallest peak that can be had to that of keeping everything: the predicted step of the search, and of the
best named policy whose predicted peak fits, both with logits whole or in pieces as they decide within that
budget. All are simulated on the program that runs. CPU seconds: of capture, of the frontier, of the
smallest peak after it, and of each budget's search, the first of which also makes what the others use. What
points of a frontier say is put beside what the whole step takes, simulated for each (``whole``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stepgraph.api.models import find_model, language_model_loss
from stepgraph.api.plan import build_on_meta
from stepgraph.api.planner import Planner, make_optimizer
from stepgraph.cost.devices import find_device
from stepgraph.cost.predict import Trial
from stepgraph.errors import BudgetError, MemoryPolicyError
from stepgraph.memory.decide import Means, decide, frontier
from stepgraph.memory.pieces import find_pieces, said
from stepgraph.memory.presets import NONE
from stepgraph.memory.solver.profile import Simulate
from stepgraph.pipeline import PLACED, form, simulation
from stepgraph.placement import apply as placement
from stepgraph.placement.presets.named import decide_by_preset, gathers_again
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.planning.plan import preset_plan
from stepgraph.planning.request import AUTO, Precision, StepSettings
from stepgraph.program.driver import PassDriver, no_collections
from stepgraph.program.program import Program
from stepgraph.runtime.ranks import parse_mesh

MODELS = {
    "llama-tiny": ("dp=4", "zero3", 128),
    "gpt2": ("dp=8", "ddp", 1024),
    "qwen3-0.6b": ("dp=16,tp=8", "tp+zero3", 8192),
    "llama3-8b": ("dp=16,tp=8", "tp+zero3", 8192),
    "llama3-70b": ("dp=64,tp=8", "tp+sp+zero3", 8192),
    "llama3-405b": ("replicate=16,shard=128,tp=8", "tp+sp+hsdp", 8192),
}
NAMED = ("none", "ops", "full", "layers:2", "layers:4")
ROWS_PER_RANK, BUDGETS = 2, 8


def measure(name: str) -> dict[str, Any]:
    """One model at all budgets."""
    mesh_text, preset, length = MODELS[name]
    mesh, device = parse_mesh(mesh_text), find_device("h100")
    clock = Clock()
    model = build_on_meta(find_model(name))
    ids = torch.empty(ROWS_PER_RANK * mesh.data_size, length, dtype=torch.int64, device="meta")
    step = StepSettings("adamw", precision=Precision(torch.bfloat16))
    optimizer = make_optimizer("adamw", model)
    batch = {"input_ids": ids, "labels": ids}
    planner = Planner(model, batch, language_model_loss, optimizer, device, step)
    program = planner.captured(preset, mesh).programs["step"]
    row: dict[str, Any] = {"model": name, "mesh": mesh_text, "placement": preset}
    row["capture_s"] = clock.lap()
    plan = preset_plan(preset, mesh, device=device.name, step=step)
    program = form(program, plan, PassDriver())
    where = decide_by_preset(program, mesh, preset)
    program = placement.apply(program, where, mesh, 1, PLACED, PassDriver())
    row["placement_s"] = clock.lap()
    simulate, again = Known(simulation(plan, planner.target)), gathers_again(preset, mesh)
    means = Means(simulate, device, fused=True)

    def within(budget: int, policy: str) -> tuple[MemoryDecision, Trial]:
        means.budget = budget
        decision = decide(program, policy, again, lambda: means)
        return decision, simulate(program, decision)

    row["frontier"] = [asdict(point) for point in frontier(program, again, means)]
    row["frontier_s"], of_frontier = clock.lap(), means
    most = within(1, NONE)[1].memory.peak()
    try:
        smallest = within(1, AUTO)[1].memory.peak()
    except BudgetError as error:
        smallest = error.smallest
    assert smallest is not None
    row["smallest_peak_bytes"], row["smallest_s"] = smallest, clock.lap()
    means = Means(simulate, device, fused=True)  # as within one budget alone
    row["budgets"] = []
    for number in range(BUDGETS):
        budget = smallest + (most - smallest) * number // (BUDGETS - 1)
        decision, trial = within(budget, AUTO)
        one: dict[str, Any] = {"budget_bytes": budget, "search_s": clock.lap()}
        one |= {"peak_bytes": trial.memory.peak(), "step_ms": trial.seconds * 1e3}
        one["keeps"] = decision.reason
        one["named_ms"] = {}
        for policy in NAMED:
            with contextlib.suppress(MemoryPolicyError):
                _, trial = within(budget, policy)
                if trial.memory.peak() <= budget:
                    one["named_ms"][policy] = trial.seconds * 1e3
        one["best_named"] = min(one["named_ms"], key=one["named_ms"].__getitem__, default=None)
        row["budgets"].append(one)
        gc.collect()  # what a search leaves is as much as it had
        clock.lap()
    add_whole(row["frontier"], of_frontier, program, again)
    return row


def add_whole(
    points: list[dict[str, Any]], means: Means, program: Program, gather_again: bool
) -> None:
    """Beside what each point of a frontier says, what the whole step takes."""
    ways = {}
    for pieces in (None, find_pieces(program, means.device.capacity)):
        search = means.search(program, gather_again, pieces)
        for one in search.candidates:
            ways.setdefault(search.describe(one.mix) + said(pieces), one)
    for point in points:
        trial = ways[point["keeps"]].trial()
        point["whole"] = {"peak_bytes": trial.memory.peak(), "step_ms": trial.seconds * 1e3}


class Known:
    """Simulates; what was simulated before is known."""

    def __init__(self, simulate: Simulate) -> None:
        self.simulate = simulate
        self.known: dict[tuple[int, str], tuple[Program, Trial]] = {}

    def __call__(self, program: Program, decision: MemoryDecision) -> Trial:
        """What a Program takes under a decision."""
        kept = dict(decision.recompute), dict(decision.pieces or {}), decision.offload
        key = id(program), repr(kept)
        if key not in self.known:
            self.known[key] = program, self.simulate(program, decision)
        return self.known[key][1]


class Clock:
    """CPU seconds since the lap before."""

    def __init__(self) -> None:
        self.last = time.process_time()

    def lap(self) -> float:
        """Begins the next."""
        before, self.last = self.last, time.process_time()
        return self.last - before


def show(row: dict[str, Any]) -> str:
    """A table of one model."""
    took = ", ".join(
        f"{what} {row[f'{what}_s']:.1f} s" for what in ("capture", "frontier", "smallest")
    )
    lines = [f"{row['model']} on {row['mesh']}, {row['placement']}: {took}"]
    for what in ("peak_bytes", "step_ms"):
        ratios = [point[what] / point["whole"][what] for point in row["frontier"]]
        lines.append(f"  frontier, {what} of the whole's: {min(ratios):.3f} to {max(ratios):.3f}")
    for one in row["budgets"]:
        named = "nothing fits"
        if one["best_named"] is not None:
            best = one["named_ms"][one["best_named"]]
            named = f"{one['best_named']} {best:.2f} ms, ratio {one['step_ms'] / best:.3f}"
        lines.append(
            f"  {one['budget_bytes'] / 2**30:8.3f} GiB  {one['step_ms']:10.2f} ms  ({named})"
            f"  {one['search_s']:.1f} s  {one['keeps']}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures model after model, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        with no_collections():
            rows.append(measure(name))
        print(show(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
