"""What it costs a step to look whether anything changed: Python values, assigned data, other ranks' calls.

    python benchmarks/checks.py --json benchmarks/results/checks.json

Two gloo ranks; each check is called by itself some thousand times, in an engine that has compiled its step,
for Llamas of several depths. Microseconds a step, the median of rounds.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from contestants import SIZES, make_batches, make_model

import stepgraph
from stepgraph.cli import launcher
from stepgraph.runtime.batches import flatten_batch

CALLS, ROUNDS = 500, 9


def microseconds(check):
    """Of one call."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            check()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found)


def measure(name):
    """On a rank: what is checked -> microseconds."""
    torch.set_num_threads(1)
    model = make_model(SIZES[name], 512)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="zero3", lowering="eager")
    batch = make_batches(SIZES[name], 512, int(os.environ["RANK"]))[0]
    engine.step(batch)
    compiler, local = engine._compiler, flatten_batch(batch, engine._device)
    compiled = compiler.entry("step", local)

    def calls():
        with compiler.call("step", local):
            compiler.watch.runs(compiled.digest)

    return {
        "parameters": len(list(model.parameters())),
        "values that code reads": microseconds(compiled.values.hold),
        "assigned data": microseconds(compiler.data.check),
        "calls of other ranks": microseconds(calls),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    for name in SIZES:
        rows[name] = launcher.launch(measure, name, ranks=2)[0]
        print(name, {k: round(v, 2) for k, v in rows[name].items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
