"""What a budget of memory costs: ours beside torch's own `activation_memory_budget`, on two real ranks.

    PYTHONPATH=. python benchmarks/activation_budgets.py --json benchmarks/results/activation_budgets.json

torch's is DDP around a compiled Llama, partitioned with a fraction of the activations to keep; ours is
`ddp` under `memory="budget:..."` of as many bytes as torch's step was measured to hold. Both by inductor,
float32, AdamW (torch's fused one), one thread a rank; they take turns in the same processes. A peak is what
is held between steps (parameters, optimizer state; DDP's buckets of gradients) and the most that the host's
allocator gave out above that within a step; the larger rank's. A step is the slower rank's.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import LEARNING_RATE, Size, ddp_compile_inside, make_batches, make_model
from tests.allocated_memory import allocated_peak

RANKS, VOCABULARY = 2, 2048
SIZES = {
    "4 layers of 256": Size(4, 256, heads=4, intermediate=688, batch=4, tokens=256, steps=3),
    "8 layers of 256": Size(8, 256, heads=4, intermediate=688, batch=8, tokens=128, steps=2),
}
FRACTIONS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


def torch_step(size: Size, fraction: float):
    """A step with a fraction of the activations kept, and how often it holds its parameters' bytes."""
    model = make_model(size, VOCABULARY)
    step = ddp_compile_inside(model)
    batches = make_batches(size, VOCABULARY, dist.get_rank())
    with torch._functorch.config.patch(activation_memory_budget=fraction):
        for batch in batches[:3]:
            step(batch)
    return step, 4  # parameters, AdamW's two moments, DDP's buckets


def our_step(size: Size, budget: int):
    """A step within a budget of bytes, and how often it holds its parameters' bytes between steps."""
    import stepgraph

    model = make_model(size, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = make_batches(size, VOCABULARY, dist.get_rank())
    memory = f"budget:{budget / 2**20:.2f}MiB"
    engine = stepgraph.Engine(
        model, optimizer=optimizer, plan="ddp", memory=memory, compute_dtype=None
    )
    for batch in batches[:3]:
        engine.step(batch)
    return engine.step, 3


def of_ranks(value: Any) -> list[Any]:
    """What every rank says."""
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def measured_peak(step, times: int, size: Size, batch) -> int:
    """Bytes, of the larger rank."""
    parameters = sum(parameter.nbytes for parameter in make_model(size, VOCABULARY).parameters())
    return max(of_ranks(times * parameters + allocated_peak(lambda: step(batch))))


def run_rank(size: Size, rounds: int) -> dict[str, Any]:
    """One rank: both at each budget."""
    import logging

    from stepgraph.errors import BudgetError

    logging.getLogger("stepgraph").setLevel(logging.ERROR)
    batches = make_batches(size, VOCABULARY, dist.get_rank())
    found: dict[str, Any] = {}
    for fraction in FRACTIONS:
        theirs, held = torch_step(size, fraction)
        peak = measured_peak(theirs, held, size, batches[0])
        cell = found[str(fraction)] = {"torch_peak_mib": round(peak / 2**20, 1)}
        try:
            ours, held = our_step(size, peak)
        except BudgetError as error:
            cell["error"] = str(error).split("\n")[0]
            continue
        ours_peak = measured_peak(ours, held, size, batches[0])
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for step, mine in zip((theirs, ours), times, strict=True):
                dist.barrier()
                taken = []
                for number in range(size.steps):
                    start = time.perf_counter()
                    step(batches[number % len(batches)])
                    taken.append((time.perf_counter() - start) * 1e3)
                mine.append(max(of_ranks(statistics.median(taken))))
        cell |= {
            "peak_mib": round(ours_peak / 2**20, 1),
            "peak_ratio": round(ours_peak / peak, 3),
            "torch_ms": round(statistics.median(times[0]), 1),
            "ms": round(statistics.median(times[1]), 1),
            "ratio": round(statistics.median(b / a for a, b in zip(*times, strict=True)), 3),
        }
        if dist.get_rank() == 0:
            print(f"  {fraction}: {cell}", flush=True)
    return found


def main() -> None:
    """The command line."""
    from stepgraph.cli.launcher import launch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "about": (__doc__ or "").split("\n\n")[-1],
    }
    for name, size in SIZES.items():
        print(name, flush=True)
        report[name] = launch(run_rank, size, arguments.rounds, ranks=RANKS)[0]
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
