"""How many operations the optimizer's phase of GPT-2 has, as it is executed under inductor.

    python benchmarks/optimizer_operations.py --json benchmarks/results/optimizer_operations.json

GPT-2 of 12 layers on the meta device, AdamW; the phase runs from the reduced gradients to the written
parameters. Counted is what does something: views, results taken out of others and waits do not; nor does
a write of what was just computed, which is its kernel's (the counter of steps). Under ZeRO 1 and 2 it is
mostly what brings new parts of parameters to all ranks. A rank's own program is counted, so nothing is
launched.
"""

import argparse
import collections
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import fx

import stepgraph
from stepgraph import pipeline
from stepgraph.operators import table as operators
from stepgraph.operators.views import is_view
from stepgraph.program.driver import PassDriver
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program

PLACEMENTS = {"ddp": (1, 2), "zero1": (2,), "zero2": (2,), "zero3": (2, 4)}


def gpt2(layers: int) -> torch.nn.Module:
    """With random weights, on the meta device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def counted(program: Program) -> collections.Counter[str]:
    """Operators of the phase, with how often they are called."""
    return collections.Counter(
        str(node.target)
        for node in program.operations()
        if meta(node)["phase"] == OPTIMIZER and not is_view(node) and not _is_stored(node)
    )


def _is_stored(node: fx.Node) -> bool:
    """Whether a write is of what was computed right there: one kernel does both."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    value = node.args[1]
    return meta(value)["phase"] == OPTIMIZER and operators.of(value.target).elementwise  # type: ignore


def cell(policy: str, ranks: int, clip: float | None, layers: int) -> dict[str, Any]:
    """One plan's count."""
    tokens = torch.zeros(4, 64, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    model = gpt2(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    plan = stepgraph.plan(
        model,
        example=batch,
        optimizer=optimizer,
        mesh=f"dp={ranks}",
        placement=policy,
        device="cpu",
        max_grad_norm=clip,
        compute_dtype=None,
    )
    program = plan.programs(model, example=batch, optimizer=optimizer)["step"]
    found = counted(pipeline.executed(program, "inductor", {}, PassDriver()))
    return {
        "operations": found.total(),
        "calls": dict(found.most_common()),
        "s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """All placements, with and without clipping."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"about": __doc__.split("\n\n")[-1], "torch": torch.__version__}
    for clip in (None, 1.0):
        for policy, sizes in PLACEMENTS.items():
            for ranks in sizes:
                name = f"{policy}, {ranks} rank{'s' * (ranks > 1)}{', clipped' * bool(clip)}"
                found[name] = cell(policy, ranks, clip, arguments.layers)
                print(name, found[name], flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
