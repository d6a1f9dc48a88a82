"""Step time and plan time of one source of stepgraph beside another's, interleaved.

    python benchmarks/two_sources.py ../before/src src --json benchmarks/results/two_sources.json
    python benchmarks/two_sources.py src@inductor_whole src --sizes small,medium,large --plan-rounds 0 \
        --json benchmarks/results/switch.json

For a change that must cost nothing, or two lowerings of one source. Steps: two gloo ranks of one thread
each for each source, compiled by inductor, alive at the same time; they take turns, the others waiting.
Plans: whole processes in turn, and what is timed is `stepgraph.plan` inside. A ratio is the median over
rounds of (second / first); ranks of one start differ from those of the next by more than rounds
do (where their memory lies). Peaks are resident memory of the larger rank during all steps but the first,
what it imported included.
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
from typing import Any, NamedTuple

from contestants import SIZES, make_batches, make_model, stepgraph_engine

RANKS, VOCABULARY = 2, 512
PLANS = ("ddp", "zero3")


def serve_steps(size_name: str, plan: str, lowering: str) -> None:
    """A rank: builds, then takes as many steps as each line of standard input says."""
    import torch

    torch.set_num_threads(1)
    size = SIZES[size_name]
    step = stepgraph_engine(plan, lowering)(make_model(size, VOCABULARY))
    batches = make_batches(size, VOCABULARY, int(os.environ["RANK"]))
    print(float(step(batches[0])), flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    for line in sys.stdin:
        if line == "peak\n":
            status = Path("/proc/self/status").read_text()
            print(int(status.split("VmHWM:")[1].split()[0]) / 1024, flush=True)
            continue
        took = []
        for number in range(int(line)):
            start = time.perf_counter()
            step(batches[number % len(batches)])
            took.append(time.perf_counter() - start)
        print(statistics.median(took) * 1e3, flush=True)


def time_a_plan(model: str, mesh: str) -> None:
    """Prints the seconds that a plan takes, of this process's CPU: imports are not in it."""
    import stepgraph

    plan = stepgraph.plan  # imports what it needs, which is not timed
    names, sizes = zip(*(part.split("=") for part in mesh.split(",")), strict=True)
    rows = 2 * int(sizes[names.index("dp")])
    import torch

    tokens = torch.empty(rows, 8192, dtype=torch.int64, device="meta")
    start = time.process_time()
    plan(model, example={"input_ids": tokens, "labels": tokens}, mesh=mesh, placement="auto")
    print(time.process_time() - start)


class Source(NamedTuple):
    """Where `stepgraph` is, and how its steps are lowered."""

    path: Path
    lowering: str

    @classmethod
    def parse(cls, text: str) -> "Source":
        """`src`, or `src@inductor_whole`."""
        path, _, lowering = text.partition("@")
        return cls(Path(path), lowering or "inductor")


def start(source: Source, what: str, *arguments: str, **more: str) -> subprocess.Popen:
    """This file again, on one of the sources."""
    environment = (
        os.environ | more | {"PYTHONPATH": str(source.path.resolve()), "OMP_NUM_THREADS": "1"}
    )
    environment["TRANSFORMERS_VERBOSITY"] = "error"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, what, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def start_ranks(source: Source, size: str, plan: str) -> list[subprocess.Popen]:
    """The ranks of one source."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    world["LOCAL_WORLD_SIZE"] = str(RANKS)
    return [
        start(source, "steps", size, plan, source.lowering, RANK=str(r), LOCAL_RANK=str(r), **world)
        for r in range(RANKS)
    ]


def answers(ranks: list[subprocess.Popen]) -> list[float]:
    """What every rank prints next."""
    lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    return [float(line) for line in lines]


def ask(ranks: list[subprocess.Popen], what: object) -> float:
    """The larger answer of a number of steps (milliseconds each), or of `peak` (MiB)."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{what}\n")
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


def compare_steps(
    sources: list[Source], size: str, plan: str, rounds: int, starts: int
) -> dict[str, Any]:
    """One size under one preset; rounds of several starts are taken together."""
    runs = [steps_of(sources, size, plan, rounds) for _ in range(starts)]
    took = [[ms for run, _ in runs for ms in run[which]] for which in range(len(sources))]
    peaks = [statistics.median(peaks[which] for _, peaks in runs) for which in range(len(sources))]
    return compare(*took) | {"peak_mib": peaks, "peak_ratio": peaks[1] / peaks[0]}


def steps_of(
    sources: list[Source], size: str, plan: str, rounds: int
) -> tuple[list[list[float]], list[float]]:
    """Of one start: each source's milliseconds by round, and its peak."""
    jobs = []
    for source in sources:  # one after the other: compiling is not what is measured
        jobs.append(start_ranks(source, size, plan))
        answers(jobs[-1])
    took: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        order = list(range(len(jobs)))[:: 1 if number % 2 else -1]
        for index in order:
            milliseconds = ask(jobs[index], SIZES[size].steps)
            if number:  # the first round is warm-up
                took[index].append(milliseconds)
    peaks = [ask(job, "peak") for job in jobs]
    for rank in (rank for job in jobs for rank in job):
        rank.communicate()
    return took, peaks


def compare_plans(sources: list[Source], model: str, mesh: str, rounds: int) -> dict[str, Any]:
    """One model on one mesh."""
    took: list[list[float]] = [[] for _ in sources]
    for _ in range(rounds):
        for index, source in enumerate(sources):
            out, _ = start(source, "plan", model, mesh).communicate()
            took[index].append(float(out.splitlines()[-1]))
    return compare(*took)


def show(name: str, row: dict[str, Any]) -> None:
    """A line of what was found."""
    print(name, {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs=2, type=Source.parse)
    parser.add_argument("--sizes", default="small,medium")
    parser.add_argument("--presets", default=",".join(PLANS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--plan-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"about": "steps: ms; plans: CPU seconds; ratio: second / first"}
    for size in filter(None, given.sizes.split(",")):
        for plan in given.presets.split(","):
            name = f"step {size} {plan}"
            found[name] = compare_steps(given.sources, size, plan, given.rounds, given.starts)
            show(name, found[name])
    if given.plan_rounds:
        name = "plan llama3-8b dp=16,tp=8"
        found[name] = compare_plans(given.sources, "llama3-8b", "dp=16,tp=8", given.plan_rounds)
        show(name, found[name])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["steps", size, plan, lowering]:
            serve_steps(size, plan, lowering)
        case ["plan", model, mesh]:
            time_a_plan(model, mesh)
        case _:
            main()
