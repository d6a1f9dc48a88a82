"""Saving and loading beside torch's own distributed checkpoint, on two gloo ranks, same state.

    python benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json

Both write the same sharded model and AdamW state to new folders of the same disk and sync the files;
stepgraph also checksums them, writes its manifest and renames the folder, and checks it all again before
it loads. Contestants take turns round by round, behind a barrier; a time is that of the slower rank, and
a ratio is the median over rounds of the times in the same round. `returns` is how long a save in the
background keeps the training loop; `step` is the median step with such a save under way, and without one.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import stepgraph

RANKS = 2
SIZES = {"small": (4, 128), "medium": (8, 512), "large": (12, 1024)}  # layers, width
ROWS = 8


def make_engine(layers: int, width: int) -> tuple[stepgraph.Engine, torch.optim.Optimizer]:
    """Blocks of two linear layers and a norm, which is 8 width^2 parameters each."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    model = nn.Sequential(*(part for block in blocks for part in (block, nn.LayerNorm(width))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = stepgraph.Engine(
        model, loss=lambda m, b: m(b).square().mean(), optimizer=optimizer, lowering="eager"
    )
    return engine, optimizer


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that the slower rank took, both starting together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    taken = torch.tensor((time.perf_counter() - start) * 1e3)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def run_rank(rank: int, size: str, rounds: int, scratch: str) -> None:
    """One of the two ranks; the first writes what was measured."""
    warnings.simplefilter("ignore")  # torch's, about itself
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{scratch}/store", rank=rank, world_size=RANKS)
    layers, width = SIZES[size]
    engine, optimizer = make_engine(layers, width)
    batch = torch.randn(ROWS, width)
    for _ in range(3):
        engine.step(batch)

    def state() -> dict:
        return {
            "model": get_model_state_dict(engine.model),
            "optimizer": get_optimizer_state_dict(engine.model, optimizer),
        }

    times: dict[str, list[float]] = {}
    target = state()

    def clear() -> None:
        dist.barrier()
        if rank == 0:
            for name in ("ours", "ours.async", "torchs", "torchs.async"):
                shutil.rmtree(Path(scratch, name), ignore_errors=True)
            os.sync()
        dist.barrier()

    def steps(while_saving: bool) -> list[float]:
        taken = [timed(lambda: engine.step(batch)) for _ in range(5)]
        if not while_saving:
            return taken
        clear()
        engine.save(f"{scratch}/ours.async", wait=False)
        return [timed(lambda: engine.step(batch)) for _ in range(5)]

    def torchs_async() -> None:
        pending.append(dcp.async_save(target, checkpoint_id=f"{scratch}/torchs.async"))

    pending: list = []
    turns = {
        "save": lambda: engine.save(f"{scratch}/ours"),
        "torch save": lambda: dcp.save(target, checkpoint_id=f"{scratch}/torchs"),
        "load": lambda: engine.load(f"{scratch}/ours"),
        "torch load": lambda: dcp.load(target, checkpoint_id=f"{scratch}/torchs"),
        "returns": lambda: engine.save(f"{scratch}/ours.async", wait=False),
        "torch returns": torchs_async,
    }
    order = list(turns)
    for number in range(rounds + 1):  # the first one warms up
        clear()
        # Saves before loads; within a pair, who begins alternates.
        for first, second in zip(order[::2], order[1::2], strict=True):
            for name in (first, second) if number % 2 else (second, first):
                taken = timed(turns[name])
                engine.wait_for_save()
                for save in pending:
                    save.result()
                pending.clear()
                if number:
                    times.setdefault(name, []).append(taken)
        calm, disturbed = steps(False), steps(True)
        engine.wait_for_save()
        if number:
            times.setdefault("step", []).append(statistics.median(calm))
            times.setdefault("step, saving", []).append(statistics.median(disturbed))
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    if rank == 0:
        Path(scratch, "result.json").write_text(json.dumps({"parameters": count, "ms": times}))
    dist.barrier()
    dist.destroy_process_group()


PAIRS = [
    ("save", "torch save"), ("load", "torch load"), ("returns", "torch returns"),
    ("step, saving", "step"),
]  # fmt: skip


def measure(size: str, rounds: int) -> dict:
    """Two fresh ranks; medians and ratios."""
    with tempfile.TemporaryDirectory(prefix="checkpoint_") as scratch:
        torch.multiprocessing.spawn(run_rank, (size, rounds, scratch), nprocs=RANKS)
        result = json.loads(Path(scratch, "result.json").read_text())
    times = result["ms"]
    result["median_ms"] = {name: round(statistics.median(each), 2) for name, each in times.items()}
    result["ratio"] = {}
    for mine, peer in PAIRS:
        each = [a / b for a, b in zip(times[mine], times[peer], strict=True)]
        spread = {"min": min(each), "median": statistics.median(each), "max": max(each)}
        result["ratio"][mine] = {key: round(value, 3) for key, value in spread.items()}
    return result


def show(console: Console, size: str, result: dict) -> None:
    """Print one size as a table."""
    mib = result["parameters"] * 12 / 2**20
    title = f"{size}: {result['parameters'] / 1e6:.1f} million parameters, {mib:.0f} MiB saved"
    table = Table("", "ms", "beside", "ms", "ratio: min median max", title=title)
    for mine, peer in PAIRS:
        ratio, medians = result["ratio"][mine], result["median_ms"]
        spread = f"{ratio['min']:.2f} {ratio['median']:.2f} {ratio['max']:.2f}"
        table.add_row(mine, f"{medians[mine]:.1f}", peer, f"{medians[peer]:.1f}", spread)
    console.print(table)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="small,medium", help=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=100)
    results = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {"ranks": RANKS, "threads_per_rank": 1, "rounds": arguments.rounds},
        "sizes": {},
    }
    for size in arguments.sizes.split(","):
        results["sizes"][size] = measure(size, arguments.rounds)
        show(console, size, results["sizes"][size])
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
