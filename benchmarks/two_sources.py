"""Step time and plan time of one source of stepgraph beside another's, interleaved.

    python benchmarks/two_sources.py ../before/src src --json benchmarks/results/two_sources.json

For a change that must cost nothing. Steps: two gloo ranks of one thread each for each source, compiled by
inductor, alive at the same time; they take turns, the others waiting. Plans: whole processes in turn, and
what is timed is `stepgraph.plan` inside. A ratio is the median over rounds of (second / first).
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contestants import SIZES, make_batches, make_model, stepgraph_engine

RANKS, VOCABULARY = 2, 512
PLANS = ("ddp", "zero3")


def serve_steps(size_name: str, plan: str) -> None:
    """A rank: builds, then takes as many steps as each line of standard input says."""
    import torch

    torch.set_num_threads(1)
    size = SIZES[size_name]
    step = stepgraph_engine(plan)(make_model(size, VOCABULARY))
    batches = make_batches(size, VOCABULARY, int(os.environ["RANK"]))
    print(float(step(batches[0])), flush=True)
    for line in sys.stdin:
        took = []
        for number in range(int(line)):
            start = time.perf_counter()
            step(batches[number % len(batches)])
            took.append(time.perf_counter() - start)
        print(statistics.median(took) * 1e3, flush=True)


def time_a_plan(model: str, mesh: str) -> None:
    """Prints the seconds that a plan takes, of this process's CPU: imports are not in it."""
    import stepgraph

    names, sizes = zip(*(part.split("=") for part in mesh.split(",")), strict=True)
    rows = 2 * int(sizes[names.index("dp")])
    import torch

    tokens = torch.empty(rows, 8192, dtype=torch.int64, device="meta")
    start = time.process_time()
    stepgraph.plan(
        model, example={"input_ids": tokens, "labels": tokens}, mesh=mesh, placement="auto"
    )
    print(time.process_time() - start)


def start(source: Path, what: str, *arguments: str, **more: str) -> subprocess.Popen:
    """This file again, on one of the sources."""
    environment = os.environ | more | {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    environment["TRANSFORMERS_VERBOSITY"] = "error"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, what, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def start_ranks(source: Path, size: str, plan: str) -> list[subprocess.Popen]:
    """The ranks of one source."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    world["LOCAL_WORLD_SIZE"] = str(RANKS)
    return [
        start(source, "steps", size, plan, RANK=str(r), LOCAL_RANK=str(r), **world)
        for r in range(RANKS)
    ]


def answers(ranks: list[subprocess.Popen]) -> list[float]:
    """What every rank prints next."""
    lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    return [float(line) for line in lines]


def turn(ranks: list[subprocess.Popen], steps: int) -> float:
    """Milliseconds a step of the slower rank."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{steps}\n")
        rank.stdin.flush()
    return max(answers(ranks))


def compare(first: list[float], second: list[float]) -> dict[str, Any]:
    """Medians, and the ratio of the second to the first."""
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    return {
        "first": statistics.median(first),
        "second": statistics.median(second),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def compare_steps(sources: list[Path], size: str, plan: str, rounds: int) -> dict[str, Any]:
    """One size under one preset."""
    jobs = []
    for source in sources:  # one after the other: compiling is not what is measured
        jobs.append(start_ranks(source, size, plan))
        answers(jobs[-1])
    took: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        order = list(range(len(jobs)))[:: 1 if number % 2 else -1]
        for index in order:
            milliseconds = turn(jobs[index], SIZES[size].steps)
            if number:  # the first round is warm-up
                took[index].append(milliseconds)
    for rank in (rank for job in jobs for rank in job):
        rank.communicate()
    return compare(*took)


def compare_plans(sources: list[Path], model: str, mesh: str, rounds: int) -> dict[str, Any]:
    """One model on one mesh."""
    took: list[list[float]] = [[] for _ in sources]
    for _ in range(rounds):
        for index, source in enumerate(sources):
            out, _ = start(source, "plan", model, mesh).communicate()
            took[index].append(float(out.splitlines()[-1]))
    return compare(*took)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs=2, type=Path)
    parser.add_argument("--sizes", default="small,medium")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plan-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"about": "steps: ms; plans: CPU seconds; ratio: second / first"}
    for size in filter(None, given.sizes.split(",")):
        for plan in PLANS:
            name = f"step {size} {plan}"
            found[name] = compare_steps(given.sources, size, plan, given.rounds)
            print(
                name, {k: round(v, 3) for k, v in found[name].items() if k != "ratios"}, flush=True
            )
    if given.plan_rounds:
        name = "plan llama3-8b dp=16,tp=8"
        found[name] = compare_plans(given.sources, "llama3-8b", "dp=16,tp=8", given.plan_rounds)
        print(name, {k: round(v, 3) for k, v in found[name].items() if k != "ratios"}, flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["steps", size, plan]:
            serve_steps(size, plan)
        case ["plan", model, mesh]:
            time_a_plan(model, mesh)
        case _:
            main()
