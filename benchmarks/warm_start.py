"""Seconds to the end of the first step: a second start beside the first, and beside one without a compiler.

    python benchmarks/warm_start.py --json benchmarks/results/warm_start.json

A start is a new process (of two ranks: each): what it imports, then engine and first step (wall clock, the
slower rank). ``cold`` begins with an empty cache of compiled code, ``warm`` with what that left behind,
``eager`` compiles nothing. Precompiled C++ headers are torch's own, and there in all of them. They take
turns.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from subprocess import run as run_process

MODELS = {"llama-tiny": None, "12 layers": 12}
KINDS = ("eager", "cold", "warm")


def one_start(model: str, lowering: str) -> dict[str, float]:
    """On one rank, in a process that has imported nothing yet."""
    begin = time.perf_counter()
    import torch
    import torch._inductor.compile_fx
    import transformers.models.llama.modeling_llama  # noqa: F401

    import stepgraph
    from stepgraph.api.models import build_model

    imports = time.perf_counter() - begin
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if MODELS[model] is None:
        module = build_model(model, 0)
    else:
        from compile_time import model_of

        module = model_of(MODELS[model], 128)
    tokens = torch.randint(256, (4, 64))
    before, begin = _cpu(), time.perf_counter()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine = stepgraph.Engine(module, optimizer=optimizer, lowering=lowering)
    loss = engine.step({"input_ids": tokens, "labels": tokens.clone()}).item()
    found = {"imports_s": imports, "first_step_s": time.perf_counter() - begin}
    return {**found, "first_step_cpu_s": _cpu() - before, "loss": loss}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def start(model: str, lowering: str, ranks: int, cache: str) -> dict[str, float]:
    """All ranks; of each figure the largest."""
    command = [sys.executable, "-W", "ignore", __file__, "start", model, lowering]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:3] = ["-W", "ignore", *launcher]
    source = str(Path(__file__).parents[1] / "src")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "STEPGRAPH_PROGRESS": "0"}
    environment |= {"PYTHONPATH": source, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = run_process(command, env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) != ranks:
        raise SystemExit(done.stderr)
    return {name: max(row[name] for row in rows) for name in rows[0]}


def measure(model: str, ranks: int, rounds: int, pairs: int) -> dict:
    """One model on so many ranks; for each cold start so many without a compiler and warm ones, in turn."""
    taken: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="warm_start_") as cache:
            for kind in (*KINDS, *("eager", "warm") * (pairs - 1)):
                lowering = "eager" if kind == "eager" else "inductor"
                taken[kind].append(start(model, lowering, ranks, cache))
    row = {
        kind: {name: round(statistics.median(r[name] for r in rows), 3) for name in rows[0]}
        for kind, rows in taken.items()
    }
    row["first_steps_s"] = {
        kind: [round(r["first_step_s"], 1) for r in rows] for kind, rows in taken.items()
    }
    row["beyond_eager_s"] = round(row["warm"]["first_step_s"] - row["eager"]["first_step_s"], 3)
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=1, help="warm starts for each cold one")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict = {"machine": platform.processor() or platform.machine(), "rounds": given.rounds}
    found["pairs"] = given.pairs
    for model in MODELS:
        for ranks in (1, 2):
            name = f"{model}, {ranks} rank{'s' * (ranks > 1)}"
            found[name] = measure(model, ranks, given.rounds, given.pairs)
            print(name, json.dumps(found[name]), flush=True)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        # In one go: ranks share the pipe.
        os.write(1, f"{json.dumps(one_start(*sys.argv[2:]))}\n".encode())
    else:
        main()
