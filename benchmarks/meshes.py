"""tp, tp+zero3 and hsdp beside parallelize_module and FSDP2 in two dimensions, on four gloo ranks.

    python benchmarks/meshes.py --sizes small,medium --json benchmarks/results/meshes.json

Every contestant trains the same Llama in one run, round by round, one after the other; a round's time is
the slowest rank's median step, a ratio is the median over rounds of the two times of one round. The first
peer runs twice, so that the spread of equals stands beside. (Where rows differ by rank, torch's contestants
return the loss of the first rank's rows, stepgraph that of all.)
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import torch
import torch.distributed as dist
from contestants import LEARNING_RATE, SIZES, make_batches, make_model, usual_step
from rich.console import Console
from rich.table import Table

from stepgraph.runtime.ranks import communication_first

RANKS, VOCABULARY = 4, 256
AGAIN = "torch tp again"


def cut_layers(model, mesh):
    """Megatron's plan for a transformers Llama, as torch's tutorials write it."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def shard(model, mesh):
    """FSDP2 on every decoder layer and the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mesh_of(sizes, names):
    """A mesh of torch's contestants; its groups' threads are scheduled as those of stepgraph's groups."""
    from torch.distributed.device_mesh import init_device_mesh

    with communication_first("cpu"):
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def torch_tp(model, compiled=False):
    """parallelize_module over four ranks."""
    cut_layers(model, mesh_of((RANKS,), ("tp",)))
    call = torch.compile(model, isolate_recompiles=True) if compiled else model
    return usual_step(call, model, fused=False)


def torch_tp_zero3(model):
    """parallelize_module on one dimension, FSDP2 on the other."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    cut_layers(model, mesh["tp"])
    shard(model, mesh["dp"])
    return usual_step(model, model, fused=False)


def torch_hsdp(model):
    """FSDP2 on a mesh of replicas and shards."""
    shard(model, mesh_of((2, 2), ("replicate", "shard")))
    return usual_step(model, model, fused=False)


def ours(plan, mesh):
    """stepgraph's engine under a preset."""

    def build(model):
        import stepgraph

        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return stepgraph.Engine(model, optimizer=optimizer, plan=plan, mesh=mesh).step

    return build


# name: (builder, ranks that hold different rows, its peer)
CONTESTANTS = {
    "torch tp": (torch_tp, 1, None),
    AGAIN: (torch_tp, 1, "torch tp"),
    "torch tp, compiled": (lambda model: torch_tp(model, True), 1, "torch tp"),
    "torch tp+fsdp2": (torch_tp_zero3, 2, None),
    "torch hsdp": (torch_hsdp, 4, None),
    "stepgraph tp": (ours("tp", "tp=4"), 1, "torch tp"),
    "stepgraph tp+sp": (ours("tp+sp", "tp=4"), 1, "torch tp"),
    "stepgraph tp+zero3": (ours("tp+zero3", "dp=2,tp=2"), 2, "torch tp+fsdp2"),
    "stepgraph hsdp": (ours("hsdp", "replicate=2,shard=2"), 4, "torch hsdp"),
}


def run_rank(size_name, rounds, steps):
    """One rank: milliseconds a step by contestant and round, and losses."""
    import logging

    logging.getLogger("stepgraph").setLevel(logging.ERROR)
    size, rank = SIZES[size_name], dist.get_rank()
    built, errors = {}, {}
    for name, (builder, parts, _) in CONTESTANTS.items():
        batches = make_batches(size, VOCABULARY, rank // (RANKS // parts))
        error = None
        try:
            step = builder(make_model(size, VOCABULARY))
            for batch in batches[:3]:
                loss = float(step(batch))
        except Exception as caught:
            error = f"{type(caught).__name__}: {str(caught)[:200]}"
        found = [None] * RANKS
        dist.all_gather_object(found, error)
        if any(found):
            errors[name] = next(e for e in found if e)
        else:
            built[name] = (step, batches, loss)
        if rank == 0:
            print(f"  {size_name} {name}: {errors.get(name, 'ready')}", flush=True)
    times = {name: [] for name in built}
    for _ in range(rounds):
        for name, (step, batches, _) in built.items():
            taken = []
            dist.barrier()
            for index in range(steps):
                start = time.perf_counter()
                step(batches[index % len(batches)])
                taken.append((time.perf_counter() - start) * 1e3)
            each = [None] * RANKS
            dist.all_gather_object(each, statistics.median(taken))
            times[name].append(max(each))
    return times, {name: loss for name, (_, _, loss) in built.items()}, errors


def main() -> None:
    """The command line."""
    from stepgraph.cli.launcher import launch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="small,medium")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {"torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
    for size in arguments.sizes.split(","):
        steps = max(2, SIZES[size].steps // 4)
        times, losses, errors = launch(run_rank, size, arguments.rounds, steps, ranks=RANKS)[0]
        table = Table(title=f"{size}, four ranks on {os.cpu_count()} cores")
        for column in ("contestant", "step ms", "of peer", "min", "max", "loss"):
            table.add_column(column, justify="left" if column == "contestant" else "right")
        records = report[size] = {}
        for name, rounds in times.items():
            record = records[name] = {"median_ms": statistics.median(rounds), "rounds_ms": rounds}
            record["loss_after_warmup"] = losses[name]
            row = [name, f"{record['median_ms']:.1f}", "", "", "", f"{losses[name]:.4f}"]
            peer = CONTESTANTS[name][2]
            if peer in times:
                values = [a / b for a, b in zip(rounds, times[peer], strict=True)]
                record |= {"peer": peer, "ratio_to_peer": statistics.median(values)}
                record["round_ratios"] = values
                row[2:5] = (
                    f"{v:.3f}" for v in (statistics.median(values), min(values), max(values))
                )
            table.add_row(*row)
        for name, error in errors.items():
            records[name] = {"error": error}
            table.add_row(name, error, "", "", "", "")
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
