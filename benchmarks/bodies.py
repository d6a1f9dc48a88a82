"""How many pieces of code a step has that inductor compiles, by depth.

    python benchmarks/bodies.py --depths 4,32 --json benchmarks/results/bodies.json

A Llama of width 128 on the meta device, AdamW, a rank's own programs as they are executed; nothing is
launched. A cell names its distinct pieces and, in brackets, how often these are called; what stands between
them (communication, copies, torch's own kernels) is called as it is.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from compile_time import model_of

import stepgraph
from stepgraph import pipeline
from stepgraph.lowering.bodies import in_pieces
from stepgraph.program.driver import PassDriver

CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": "dp=2", "placement": "ddp"},
    "zero3": {"mesh": "dp=2", "placement": "zero3"},
    "tp+zero3": {"mesh": "dp=2,tp=2", "placement": "tp+zero3"},
    "zero3, layers:2": {"mesh": "dp=2", "placement": "zero3", "memory": "layers:2"},
    "zero3, 3 micro-batches": {"mesh": "dp=2", "placement": "zero3", "micro_batches": 3},
    "zero3, clipped": {"mesh": "dp=2", "placement": "zero3", "max_grad_norm": 1.0},
    "tp+zero3, all of these": {
        "mesh": "dp=2,tp=2", "placement": "tp+zero3", "memory": "layers:2", "micro_batches": 3,
        "max_grad_norm": 1.0,
    },
}  # fmt: skip


def cell(depth: int, settings: dict[str, Any]) -> dict[str, str]:
    """The pieces of each program of a step."""
    with torch.device("meta"):
        model = model_of(depth, 128)
    tokens = torch.zeros(12, 64, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how = {"memory": "none", "schedule": "auto", "device": "cpu", "compute_dtype": None} | settings
    plan = stepgraph.plan(model, example=batch, optimizer=optimizer, **how)
    found = {}
    for name, program in plan.programs(model, example=batch, optimizer=optimizer).items():
        pieces = in_pieces(pipeline.executed(program, "inductor", {}, PassDriver()))
        compiled = [call.body for call in pieces.calls if not call.body.plain] if pieces else [None]
        found[name] = f"{len({*map(id, compiled)})} ({len(compiled)})"
    return found


def main() -> None:
    """All cells at all depths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", default="4,32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"about": __doc__.split("\n\n")[-1], "torch": torch.__version__}
    for name, settings in CELLS.items():
        found[name] = {}
        for depth in map(int, arguments.depths.split(",")):
            start = time.perf_counter()
            found[name][f"{depth} layers"] = cell(depth, settings)
            print(
                name, depth, found[name][f"{depth} layers"], f"{time.perf_counter() - start:.0f} s"
            )
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
