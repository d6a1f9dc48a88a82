"""What a small all-reduce takes between pieces of compute on two gloo ranks.

With gloo's threads scheduled before all others, and as Linux does by itself.

    python benchmarks/collective_latency.py --json benchmarks/results/collective_latency.json

Both ways take turns in the same processes, block by block. A latency counts from when the later rank calls
until both have the result.
"""

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from stepgraph.cli import launcher

FIRST, USUAL = "gloo's threads first", "as Linux does by itself"
BLOCKS, CALLS = 10, 100


def schedule(how):
    """Sets the policy of every thread of gloo's in this process."""
    policy = os.SCHED_RR if how == FIRST else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        if "gloo" in Path(f"/proc/self/task/{thread}/comm").read_text():
            os.sched_setscheduler(int(thread), policy, os.sched_param(int(how == FIRST)))


def measure(size):
    """On a rank: way -> (start, end) of every call."""
    torch.set_num_threads(1)
    left, value, found = torch.randn(size, size), torch.ones(256), {FIRST: [], USUAL: []}
    for _ in range(BLOCKS):
        for how, times in found.items():
            schedule(how)
            dist.barrier()
            for _ in range(CALLS):
                torch.mm(left, left)
                start = time.perf_counter()
                dist.all_reduce(value)
                times.append((start, time.perf_counter()))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for size in (256, 512):
        ranks = launcher.launch(measure, size, ranks=2)
        for how in (FIRST, USUAL):
            calls = list(zip(*(rank[how] for rank in ranks), strict=True))
            seconds = [max(e for _, e in call) - max(s for s, _ in call) for call in calls]
            twentieths = statistics.quantiles(seconds, n=20)
            row = {"compute": f"a product of {size} x {size}", "how": how, "calls": len(calls)}
            row |= {"mean_us": round(statistics.mean(seconds) * 1e6)}
            row |= {f"p{p}_us": round(twentieths[p // 5 - 1] * 1e6) for p in (10, 50, 75, 95)}
            rows.append(row)
            print(row)
    if options.json:
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        }
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
