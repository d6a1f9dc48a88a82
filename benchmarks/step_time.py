"""Training-step time of stepgraph beside DDP, FSDP2 and torch.compile, on two gloo ranks.

    python benchmarks/step_time.py --sizes small,medium --json benchmarks/results/step_time.json

All contestants live in the same two processes, one thread each, and take turns round by round, so
that they share whatever else the machine is doing. A ratio is the median over rounds of (median of
the contestant's turn / median of its peer's turn); below 1 the contestant is faster. The A/A line
is a peer against a second copy of itself: a ratio inside that spread says nothing.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from contestants import CONTESTANTS, LEARNING_RATE, PEERS, SIZES
from ranks import AGAIN, WORLD_SIZE, Settings, run_rank
from rich.console import Console
from rich.table import Table


def run_pair(
    arguments: argparse.Namespace,
    size: str,
    memory_of: str | None = None,
    variants: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Start two fresh ranks and return what they measured; an error where they died."""
    with tempfile.TemporaryDirectory(prefix="step_time_") as scratch:
        settings = Settings(
            size=size,
            contestants=tuple(arguments.contestants),
            vocabulary=arguments.vocabulary,
            steps=arguments.steps or SIZES[size].steps,
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            profile=size in arguments.profile,
            scratch=scratch,
            variants=variants or {},
        )
        try:
            torch.multiprocessing.spawn(run_rank, (settings, memory_of), nprocs=WORLD_SIZE)
            return json.loads(Path(scratch, "result.json").read_text())
        except Exception as caught:
            return {"error": f"the pair of processes died: {caught}"}


def ratios(records: dict[str, dict[str, Any]]) -> None:
    """Write into every record its ratio to its peer, and into every peer its A/A spread."""

    def by_round(name: str, peer: str) -> list[float] | None:
        mine = records.get(name, {}).get("round_median_ms")
        theirs = records.get(peer, {}).get("round_median_ms")
        return [a / b for a, b in zip(mine, theirs, strict=True)] if mine and theirs else None

    for name, peer in PEERS.items():
        if values := by_round(name, peer):
            records[name]["peer"] = peer
            records[name]["ratio_to_peer"] = statistics.median(values)
            records[name]["round_ratios"] = values
    for peer in set(PEERS.values()):
        if values := by_round(peer + AGAIN, peer):
            spread = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            records[peer]["a_a_ratio"] = spread


def measure(arguments: argparse.Namespace, size: str) -> dict[str, Any]:
    """Times, and memory if wanted, of all contestants at one size."""
    records: dict[str, Any] = {}
    if arguments.rounds:
        records = run_pair(arguments, size)
        if isinstance(records.get("error"), str):
            records = {"everybody": records}
        ratios(records)
    if arguments.memory:
        for name in arguments.contestants:
            record = records.setdefault(name, {})
            if not record.get("error"):
                # Without a trial in the timed run, the first variant stands for the contestant.
                variant = record.get("variant", next(iter(CONTESTANTS[name])))
                print(f"  {size} {name}: memory", flush=True)
                runs = [
                    run_pair(arguments, size, name, {name: variant})
                    for _ in range(arguments.memory)
                ]
                record["memory"] = median_of(runs)
    return records


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each number the median over pairs of processes, and all of them; an error where one died."""
    if failed := next((run for run in runs if run.get("error")), None):
        return failed
    numbers = [name for name, value in runs[0].items() if isinstance(value, float)]
    found = {name: statistics.median(run[name] for run in runs) for name in numbers}
    return {"error": None, **found, "runs": runs}


def show(console: Console, size: str, records: dict[str, Any]) -> None:
    """Print one size's results as a table, and its profiles below."""
    shape = SIZES[size]
    title = f"{size}: {shape.layers} layers, width {shape.width}, "
    table = Table(title=title + f"{shape.batch} x {shape.tokens} tokens per rank")
    columns = ("step ms", "of peer", "A/A min-median-max", "compile s", "peak MiB", "steady MiB")
    table.add_column("contestant", no_wrap=True)
    for column in (*columns, "loss"):
        table.add_column(column, justify="right")

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    for name, record in records.items():
        if name.endswith(AGAIN) and not record.get("error"):
            continue
        if record.get("error"):
            table.add_row(name, "failed", *[""] * 6)
            continue
        label = f"{name} ({record['variant']})" if record.get("variant") else name
        a_a = record.get("a_a_ratio")
        first = record.get("first_step_seconds")
        memory = record.get("memory", {})
        table.add_row(
            label,
            number(record.get("median_ms"), 2),
            number(record.get("ratio_to_peer"), 3),
            "" if a_a is None else f"{a_a['min']:.3f} {a_a['median']:.3f} {a_a['max']:.3f}",
            number(None if first is None else first + record["build_seconds"], 1),
            "failed" if memory.get("error") else number(memory.get("peak_with_compilation_mib"), 0),
            number(memory.get("peak_of_steady_steps_mib"), 0),
            number(record.get("loss_after_warmup"), 4),
        )
    console.print(table)
    for name, record in records.items():
        error = record.get("error") or record.get("memory", {}).get("error")
        if error:
            console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
        if extra := record.get("graphs_compiled_in_turns"):
            console.print(f"{name}: {extra} graphs compiled while it took turns", style="yellow")
    taken = {name: record.get("profile", {}) for name, record in records.items()}
    profiles = {name: p for name, p in taken.items() if "stepping_thread_ms" in p}
    if profiles:
        show_profiles(console, size, profiles)


def show_profiles(console: Console, size: str, profiles: dict[str, Any]) -> None:
    """Print where each contestant's step spends its time."""
    table = Table(title=f"{size}: self time of a profiled step on the stepping thread, ms")
    kinds = {kind: None for p in profiles.values() for kind in p["stepping_thread_ms"]}
    table.add_column("contestant", no_wrap=True)
    for column in (*kinds, "other threads"):
        table.add_column(column, justify="right")
    for name, profile in profiles.items():
        here = profile["stepping_thread_ms"]
        cells = [f"{here[kind]:.2f}" if kind in here else "" for kind in kinds]
        table.add_row(name, *cells, f"{sum(profile['other_threads_ms'].values()):.2f}")
    console.print(table)


def parse() -> argparse.Namespace:
    """The command line."""

    def names(allowed: Any) -> Any:
        def split(text: str) -> list[str]:
            chosen = [name for name in text.split(",") if name]
            if unknown := [name for name in chosen if name not in allowed]:
                raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(allowed)}")
            return chosen

        return split

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=names(SIZES), default=list(SIZES), help=",".join(SIZES))
    add("--contestants", type=names(CONTESTANTS), default=list(CONTESTANTS), metavar="A,B")
    add("--steps", type=int, help="steps of one turn (default: by size)")
    add("--rounds", type=int, default=9, help="0: no times, for --memory alone")
    add("--warmup", type=int, default=6, help="steps before anything is measured, at least 5")
    add("--vocabulary", type=int, default=256)
    add(
        "--memory", type=int, nargs="?", const=1, default=0, metavar="PAIRS",
        help="also peak memory, each in so many (1) pairs of fresh processes: the median",
    )  # fmt: skip
    add("--profile", type=names(SIZES), default=[], metavar="SIZES", help="sizes to profile")
    add("--json", type=Path, help="where to write everything that was measured")
    arguments = parser.parse_args()
    if arguments.warmup < 5:
        parser.error("--warmup: at least 5")
    return arguments


def main() -> int:
    arguments = parse()
    # Read by the ranks when they import torch.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    settings = {k: v for k, v in vars(arguments).items() if k != "json"}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings
        | {"ranks": WORLD_SIZE, "threads_per_rank": 1, "dtype": "float32"}
        | {"optimizer": f"AdamW, lr {LEARNING_RATE}; fused=True for all but stepgraph"},
        "shapes": {size: vars(SIZES[size]) for size in arguments.sizes},
        "sizes": {},
    }
    console = Console() if sys.stdout.isatty() else Console(width=128)
    for size in arguments.sizes:
        result["sizes"][size] = measure(arguments, size)
        show(console, size, result["sizes"][size])
        if arguments.json:  # after every size, so that an interrupted run leaves what it has
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    failed = [
        n for records in result["sizes"].values() for n, r in records.items() if r.get("error")
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
