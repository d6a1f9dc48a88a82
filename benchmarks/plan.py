"""What planning costs: CPU seconds by stage, variables and resident memory, by model and by depth.

    python benchmarks/plan.py [--only curve,models] [--json benchmarks/results/plan.json]

Every plan runs in a fresh process: imports, the model on the meta device, then ``auto`` with memory
``full``, bf16 compute and AdamW on an H100 model, to a saved plan file; for some models once more within a
budget of memory, where it is ``auto`` that chooses what is recomputed. Beside each, in the same run, what
imports and plain capture by torch alone take; the ratios are to that. The curve plans one model at
growing depths: solving must not grow with the number of identical layers. All is done several times, in
turns, and the fastest counts: what a machine gives to others is in CPU seconds, too.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scale import cpu_seconds, resident_gib

SEQUENCE, ROWS_PER_RANK = 8192, 2
CURVE = (2, 8, 16, 32, 64, 126)
MODELS = {
    "llama3-8b": "dp=16,tp=8",
    "qwen3-0.6b": "dp=16,tp=8",
    "gpt2": "dp=8,tp=8",
    "llama3-70b": "dp=64,tp=8",
    "llama3-405b": "replicate=16,shard=128,tp=8",
}
BUDGETS_GIB = {"llama3-8b": 5.3, "llama3-70b": 16.0, "llama3-405b": 32.0}
LONGEST = {"gpt2": 1024}


def plain(model: str, layers: int, mesh: str) -> dict[str, Any]:
    """Imports, model and joint graph by torch alone."""
    import contextlib

    import torch
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, rows = build(model, layers), rows_of(mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = module.to_empty(device="cpu")
        ids = torch.empty(rows, LONGEST.get(model, SEQUENCE), dtype=torch.long)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, labels=labels).loss

    captured = _dynamo_graph_capture_for_export(Loss())(ids, ids.clone())
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, captured, (ids, ids.clone()))
    nodes = len(joint.graph_module.graph.nodes)
    return {"total_s": cpu_seconds(), "nodes": nodes, "resident_gib": resident_gib()}


def within(model: str, layers: int, mesh: str) -> dict[str, Any]:
    """:func:`planned` within the model's budget, as ``stepgraph plan --memory-budget``."""
    return planned(model, layers, mesh, int(BUDGETS_GIB[model] * 2**30))


def planned(model: str, layers: int, mesh: str, budget: int | None = None) -> dict[str, Any]:
    """The same, to a saved plan."""
    from stepgraph.placement.solver.optimise import Search
    from stepgraph.planning.file import save_plan
    from stepgraph.runtime.ranks import parse_mesh

    marks: list[tuple[str, float]] = []
    planner = planner_of(
        model, layers, mesh, stage=lambda name: marks.append((name, cpu_seconds()))
    )
    marks.append(("imports and model", cpu_seconds()))
    found: dict[str, Any] = {}
    run = Search.within

    def counted(search: Search, *arguments: Any, **more: Any) -> Any:
        before = cpu_seconds()
        solution = run(search, *arguments, **more)
        found.update(variables=solution.variables, solve_s=cpu_seconds() - before)
        return solution

    Search.within = counted
    memory = "full" if budget is None else "auto"
    attempt = planner.plan(parse_mesh(mesh), "auto", memory, budget)
    with tempfile.TemporaryDirectory() as folder:
        save_plan(attempt.plan, Path(folder) / "plan.json")
        size = (Path(folder) / "plan.json").stat().st_size
    total = cpu_seconds()
    ends = [when for _, when in marks[1:]] + [total]
    stages = {"imports and model": marks[0][1]}
    for (name, start), end in zip(marks[1:], ends[1:], strict=True):
        stages[name] = stages.get(name, 0.0) + end - start
    predicted = attempt.plan.predicted
    assert predicted is not None
    return {
        "total_s": total,
        "stages_s": stages,
        **found,
        "step_ms": predicted.step_ms,
        "gap": predicted.optimality_gap,
        "peak_gib": predicted.peak_bytes / 2**30,
        "memory": attempt.plan.memory,
        "fits": attempt.fits,
        "file_kib": size / 2**10,
        "resident_gib": resident_gib(),
    }


def planner_of(model: str, layers: int, mesh: str, stage: Any = lambda name: None) -> Any:
    """A planner of a built-in model's step: bf16 compute, AdamW, an H100 model."""
    import torch

    from stepgraph.api.models import language_model_loss
    from stepgraph.api.planner import Planner, make_optimizer
    from stepgraph.cost.devices import find_device
    from stepgraph.planning.request import Precision, StepSettings

    module, rows = build(model, layers), rows_of(mesh)
    ids = torch.empty(rows, LONGEST.get(model, SEQUENCE), dtype=torch.long, device="meta")
    return Planner(
        module,
        {"input_ids": ids, "labels": ids},
        language_model_loss,
        make_optimizer("adamw", module),
        find_device("h100"),
        StepSettings("adamw", precision=Precision(torch.bfloat16)),
        stage=stage,
    )


def build(model: str, layers: int) -> Any:
    """A built-in model, with so many layers (0: its own number), on the meta device."""
    import torch

    from stepgraph.api.models import BUILT_IN, build_model

    key = "n_layer" if "n_layer" in BUILT_IN[model] else "num_hidden_layers"
    if layers:
        BUILT_IN[model][key] = layers
    with torch.device("meta"):
        return build_model(model, 0).train()


def rows_of(mesh: str) -> int:
    """Rows of the global batch."""
    from stepgraph.runtime.ranks import parse_mesh

    return ROWS_PER_RANK * parse_mesh(mesh).data_size


def main() -> None:
    """Measures in fresh processes, one after the other, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="curve,models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="The fastest of so many counts.")
    parser.add_argument("--models", default=",".join(MODELS), help="Those of --only models.")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, model, layers, mesh = arguments.one
        measure = {"plain": plain, "planned": planned, "within": within}[kind]
        print(json.dumps(measure(model, int(layers), mesh)))
        return
    cells = []
    if "curve" in arguments.only:
        cells += [("llama3-8b", layers, MODELS["llama3-8b"]) for layers in CURVE]
    if "models" in arguments.only:
        cells += [(model, 0, MODELS[model]) for model in arguments.models.split(",")]
    results = []
    for model, layers, mesh in cells:
        row: dict[str, Any] = {"model": model, "layers": layers, "mesh": mesh}
        kinds = ["plain", "planned"]
        if not layers and model in BUDGETS_GIB:
            kinds.append("within")
            row["budget_gib"] = BUDGETS_GIB[model]
        for kind in kinds * arguments.rounds:
            command = [sys.executable, __file__, "--one", kind, model, str(layers), mesh]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                row[kind] = {"error": done.stderr.strip().splitlines()[-1][:300]}
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            if found["total_s"] < row.get(kind, {}).get("total_s", math.inf):
                row[kind] = found
        for kind, ratio in (("planned", "ratio"), ("within", "ratio_within")):
            if "total_s" in row["plain"] and "total_s" in row.get(kind, {}):
                row[ratio] = row[kind]["total_s"] / row["plain"]["total_s"]
        results.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
