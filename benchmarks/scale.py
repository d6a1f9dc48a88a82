"""What compiling a real model costs: LLaMA-3 8B by layers, zero3 on 128 ranks that are not there.

    python benchmarks/scale.py [--layers 4,8,16,32] [--json benchmarks/results/scale.json]

Each depth runs twice in fresh processes, one after the other: plain capture by torch alone (imports,
model on the meta device, joint graph), and stepgraph's whole road (the same, with placement, memory
``full``, AdamW, every pass and every invariant after each pass). CPU seconds are the process's own;
the ratio is between the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RANKS = 128
ROWS_PER_RANK = 2
SEQUENCE = 8192


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_gib() -> float:
    """Largest resident size of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def llama(layers: int) -> Any:
    """LLaMA-3 8B with so many layers, on the meta device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def plain_capture(layers: int) -> dict[str, Any]:
    """Imports, model and joint graph by torch alone."""
    import torch
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = llama(layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        ids = torch.empty(ROWS_PER_RANK * RANKS, SEQUENCE, dtype=torch.long)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, labels=labels).loss

    before = cpu_seconds()
    captured = _dynamo_graph_capture_for_export(Loss())(ids, ids.clone())
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, captured, (ids, ids.clone()))
    after = cpu_seconds()
    return {
        "imports_and_model_s": before,
        "capture_s": after - before,
        "total_s": after,
        "nodes": len(joint.graph_module.graph.nodes),
        "resident_gib": resident_gib(),
    }


def whole_road(layers: int) -> dict[str, Any]:
    """The same and everything that stepgraph does before lowering."""
    import torch

    from stepgraph.capture.module import default_loss
    from stepgraph.capture.step import Source
    from stepgraph.pipeline import capture_of, make
    from stepgraph.planning.plan import preset_plan
    from stepgraph.planning.request import StepSettings
    from stepgraph.planning.target import usual_target
    from stepgraph.program.driver import PassDriver
    from stepgraph.program.layout import MeshShape
    from stepgraph.runtime.batches import flatten_batch, global_spec

    model = llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = {
        name: torch.zeros(ROWS_PER_RANK, SEQUENCE, dtype=torch.long)
        for name in ("input_ids", "labels")
    }
    batch = global_spec(flatten_batch(rows, torch.device("cpu")), 1, RANKS)
    step = StepSettings("adamw")
    plan = preset_plan("zero3", MeshShape((("dp", RANKS),)), memory="full", step=step)
    driver = PassDriver(invariants=True)
    before = cpu_seconds()
    started = time.perf_counter()
    source = Source(model, default_loss, batch, optimizer)
    captured = capture_of(source, step, driver).step(reduces_each=True)
    program = make(captured.programs, plan, usual_target("cpu"), driver=driver).programs["step"]
    after = cpu_seconds()
    return {
        "imports_and_model_s": before,
        "compile_s": after - before,
        "wall_s": time.perf_counter() - started,
        "total_s": after,
        "nodes": len(program.graph.nodes),
        "passes_s": {f"{r.program}:{r.name}": round(r.seconds, 4) for r in driver.runs},
        "resident_gib": resident_gib(),
        "notes": [*captured.notes, *program.notes],
    }


def main() -> None:
    """Measures every depth in fresh processes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="4,8,16,32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=("plain", "whole"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure = plain_capture if arguments.one == "plain" else whole_road
        print(json.dumps(measure(int(arguments.layers))))
        return
    results = []
    for layers in map(int, arguments.layers.split(",")):
        row: dict[str, Any] = {"layers": layers}
        for kind in ("plain", "whole"):
            command = [sys.executable, __file__, "--layers", str(layers), "--one", kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row[kind] = json.loads(done.stdout.strip().splitlines()[-1])
        row["ratio"] = row["whole"]["total_s"] / row["plain"]["total_s"]
        results.append(row)
        print(
            f"{layers:3d} layers: plain {row['plain']['total_s']:.1f} s, "
            f"whole {row['whole']['total_s']:.1f} s CPU, ratio {row['ratio']:.2f}, "
            f"{row['whole']['nodes']} nodes, {row['whole']['resident_gib']:.2f} GiB",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"ranks": RANKS, "rows_per_rank": ROWS_PER_RANK, "sequence": SEQUENCE}
        arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
