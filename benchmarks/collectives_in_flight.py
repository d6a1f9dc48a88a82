"""Do several asynchronous collectives in flight survive on gloo? Without stepgraph, torch alone.

    python benchmarks/collectives_in_flight.py --json benchmarks/results/collectives_in_flight.json

Two ranks run functional collectives of mixed sizes and wait for them in another order, at most so many
in flight. On torch 2.13 one in flight is well, and two were for the time of the committed run; with eight
a rank dies within seconds of a corrupted heap. `Ranks.collectives_overlap` is why: on the host stepgraph
awaits each collective before it starts the next.
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


def run_rank(rank: int, most: int, seconds: float, scratch: str) -> None:
    """Start and await collectives for some seconds; every result is checked."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{scratch}/store", rank=rank, world_size=2)
    group = dist.group.WORLD.group_name
    same, mine = random.Random(5), random.Random(rank)  # what both do alike, and what they do not
    square = torch.randn(300, 300)
    start, done, stop = time.perf_counter(), 0, torch.zeros(1)

    def finish(pending: list) -> None:
        gathered, _, result = pending.pop(same.randrange(len(pending)))
        result = functional.wait_tensor(result)
        expected = SUM if gathered else 2 * SUM
        assert result[0].item() + result[-1].item() == expected

    while not stop.item():
        pending: list = []
        for _ in range(60):
            value = torch.full((same.choice(SIZES),), rank + 1.0)
            gathered = same.random() < 0.5
            if gathered:
                result = functional.all_gather_into_tensor(value, 2, group)
            else:
                result = functional.reduce_scatter_tensor(value, "sum", 2, group)
            pending.append((gathered, value, result))
            for _ in range(mine.randrange(4)):
                square @ square
            while len(pending) >= most:
                finish(pending)
            done += 1
        while pending:
            finish(pending)
        stop.fill_(time.perf_counter() - start > seconds)
        dist.all_reduce(stop)
    if rank == 0:
        Path(scratch, "done").write_text(str(done))
    dist.destroy_process_group()


def measure(most: int, seconds: float) -> dict:
    """How one pair of ranks ended."""
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        try:
            torch.multiprocessing.spawn(run_rank, (most, seconds, scratch), nprocs=2)
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
    for most in (1, 2, 8):
        results[f"{most} in flight"] = measure(most, arguments.seconds)
        print(most, results[f"{most} in flight"], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
