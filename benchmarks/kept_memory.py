"""What a step of two real ranks holds at its peak beside what was predicted, for every way to keep values.

    PYTHONPATH=. python benchmarks/kept_memory.py --json benchmarks/results/kept_memory.json

A Llama and a GPT-2 with dropout, each under `ddp` and `zero3`, float32, AdamW. Where operations run one by
one (``eager``) bytes of live tensors are counted operation by operation; under ``inductor`` it is the most
that the host's allocator gave out in a step, over what is held between steps. All is counted: parameters,
optimizer state, the batch. The larger rank's. What is offloaded waits in the same memory here, and gloo
copies what it gathers and scatters: the allocator's count has both, and so has the prediction beside that.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.allocated_memory import allocated_peak
from tests.live_memory import live_step
from torch import nn

import stepgraph
from stepgraph.cost.devices import find_device
from stepgraph.cost.memory import memory_timeline
from stepgraph.pipeline import as_executed, foresee
from stepgraph.runtime.batches import flatten_batch

RANKS, TOKENS, ROWS = 2, 128, 4


def llama() -> tuple[nn.Module, str]:
    """The model, and the pattern of its layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), "model.layers.*"


def gpt2() -> tuple[nn.Module, str]:
    """The model, and the pattern of its layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_layer=4, n_embd=256, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config), "transformer.h.*"


MODELS: dict[str, Callable[[], tuple[nn.Module, str]]] = {"llama": llama, "gpt2": gpt2}


def ways(layers: str, peaks: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """Names, and what `memory` is given; a budget lies between what was predicted of others before."""
    for name in ("none", "full", "layers:2", "ops"):
        yield name, name
    yield "mlp recomputed", {f"{layers}.mlp": "recompute", f"{layers}.*": "save"}
    yield "offloaded", {layers: "offload"}
    yield "budget", f"budget:{(peaks['none'] + peaks['full']) / 2 / 2**20:.2f}MiB"


def cell(model: str, preset: str, memory: Any, lowering: str) -> tuple[int, int]:
    """Bytes that were predicted and that were measured, on this rank."""
    torch.manual_seed(0)
    made, _ = MODELS[model]()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"memory": memory, "lowering": lowering, "compute_dtype": None}
    engine = stepgraph.Engine(made, optimizer=optimizer, plan=preset, **settings)
    ids = torch.randint(1000, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids.clone()}
    for _ in range(3):
        engine.step(batch)
    if lowering == "eager":
        predicted = foresee(engine.programs, find_device("cpu"), lowering)
        return predicted.peak_bytes, live_step(engine, batch).peak
    program = as_executed(engine.programs, lowering)["step"]
    total = memory_timeline(program, fused=True).resident
    compiled = engine._programs_of("step", flatten_batch(batch, torch.device("cpu")))
    assert compiled is not None
    step = compiled.programs["step"]
    held = [a for a in (*step.arguments, *batch.values()) if isinstance(a, torch.Tensor)]
    between = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return total, sum(between.values()) + allocated_peak(lambda: engine.step(batch))


def run_rank(models: list[str], lowerings: list[str]) -> dict[str, Any]:
    """One rank."""
    import logging

    logging.getLogger("stepgraph").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for lowering in lowerings:
        for model in models:
            for preset in ("ddp", "zero3"):
                peaks: dict[str, int] = {}
                for name, memory in ways(MODELS[model]()[1], peaks):
                    predicted, measured = cell(model, preset, memory, lowering)
                    rows: list[Any] = [None] * RANKS
                    dist.all_gather_object(rows, (measured, predicted))
                    measured, peaks[name] = max(rows)[0], max(row[1] for row in rows)
                    row = found[f"{lowering}, {model}, {preset}, {name}"] = {
                        "predicted_mib": round(peaks[name] / 2**20, 2),
                        "measured_mib": round(measured / 2**20, 2),
                        "ratio": round(peaks[name] / measured, 3),
                    }
                    if dist.get_rank() == 0:
                        print(f"{lowering}, {model}, {preset}, {name}: {row}", flush=True)
    return found


def main() -> None:
    """The command line."""
    from stepgraph.cli.launcher import launch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lowerings", default="eager,inductor")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    asked = given.models.split(","), given.lowerings.split(",")
    report = {"torch": torch.__version__, "about": (__doc__ or "").split("\n\n")[-1]}
    report |= launch(run_rank, *asked, ranks=RANKS)[0]
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
