"""Do several asynchronous collectives in flight survive on gloo? Without stepgraph, torch alone.

    python benchmarks/collectives_in_flight.py --json benchmarks/results/collectives_in_flight.json

Two ranks run functional collectives of mixed sizes and wait for them in another order, at most so many
in flight. On torch 2.13 one in flight is well; eight all-gathers corrupt the heap of a rank, which dies
within half a minute, while 32 reductions and one all-gather among them are well for as long.
`Target.overlaps` is why: on the host stepgraph awaits each collective before it starts the next.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

functional = torch.ops._c10d_functional
SIZES = [512, 65_536, 131_072, 352_256, 700_000, 1_000_000]
SUM = 3.0  # rank 0 brings ones, rank 1 twos
# Of each case: what runs, how many may be in flight, and how many all-gathers among them.
CASES = {
    "all three, 1 in flight": ("gather reduce scatter", 1, 1),
    "all three, 2 in flight": ("gather reduce scatter", 2, 2),
    "all three, 8 in flight": ("gather reduce scatter", 8, 8),
    "all-gathers, 8 in flight": ("gather", 8, 8),
    "all-reduces, 32 in flight": ("reduce", 32, 0),
    "reduce-scatters, 32 in flight": ("scatter", 32, 0),
    "all three, 32 in flight, 1 all-gather": ("gather reduce scatter", 32, 1),
}


def run_rank(rank: int, case: tuple[str, int, int], seconds: float, scratch: str) -> None:
    """Start and await collectives for some seconds; every result is checked."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{scratch}/store", rank=rank, world_size=2)
    group = dist.group.WORLD.group_name
    kinds, most, gathers = case[0].split(), *case[1:]
    same, mine = random.Random(5), random.Random(rank)  # what both do alike, and what they do not
    square = torch.randn(300, 300)
    start, done, stop = time.perf_counter(), 0, torch.zeros(1)

    def begin(kind: str, value: torch.Tensor) -> torch.Tensor:
        if kind == "gather":
            return functional.all_gather_into_tensor(value, 2, group)
        if kind == "scatter":
            return functional.reduce_scatter_tensor(value, "sum", 2, group)
        return functional.all_reduce(value, "sum", group)

    def finish(entry: tuple) -> None:
        pending[:] = [other for other in pending if other is not entry]
        kind, _, result = entry
        result = functional.wait_tensor(result)
        assert result[0].item() + result[-1].item() == (SUM if kind == "gather" else 2 * SUM)

    pending: list[tuple] = []
    while not stop.item():
        for _ in range(60):
            value = torch.full((same.choice(SIZES),), rank + 1.0)
            kind = same.choice(kinds)
            gathering = [entry for entry in pending if entry[0] == "gather"]
            if kind == "gather" and len(gathering) >= gathers:
                finish(gathering[0])
            if len(pending) >= most:
                finish(same.choice(pending))
            pending.append((kind, value, begin(kind, value)))
            for _ in range(mine.randrange(4)):
                square @ square
            done += 1
        while pending:
            finish(same.choice(pending))
        stop.fill_(time.perf_counter() - start > seconds)
        dist.all_reduce(stop)
    if rank == 0:
        Path(scratch, "done").write_text(str(done))
    dist.destroy_process_group()


def measure(case: tuple[str, int, int], seconds: float) -> dict:
    """How one pair of ranks ended."""
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        try:
            torch.multiprocessing.spawn(run_rank, (case, seconds, scratch), nprocs=2)
        except Exception as error:
            ended = str(error).strip().splitlines()[-1]
            return {"ended": ended, "seconds": round(time.perf_counter() - start, 1)}
        return {"ended": "well", "collectives": int(Path(scratch, "done").read_text())}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {"torch": torch.__version__}
    for name, case in CASES.items():
        results[name] = measure(case, arguments.seconds)
        print(name, results[name], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
