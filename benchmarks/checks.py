"""What it costs a step to look whether anything changed: Python values, assigned data, other ranks' calls.

    python benchmarks/checks.py --sizes small,medium --json benchmarks/results/checks.json

Two gloo ranks; each check is called by itself some thousand times, in an engine that has compiled its step,
for Llamas of several depths. Microseconds a step, the median of rounds. ``behind other memory``: the same,
but 128 MiB are written before each call: what a check reads, and the interpreter, are in no cache then.
``in steps``: what a check takes within steps that train, where it finds what they leave. ``written to``:
values that code reads, where something was written to what holds them (and they are what they were).
``steps with and without``: steps of one run, in turns with and without the first two checks, and the ratio
of the medians.
"""

import argparse
import contextlib
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
from stepgraph.runtime import compiler as compilers
from stepgraph.runtime.batches import flatten_batch
from stepgraph.runtime.compiled import that_holds

CALLS, ROUNDS, STEPS = 500, 9, 150


def microseconds(check):
    """Of one call."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            check()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found)


def microseconds_behind_other_memory(check, calls=31):
    """Of one call that finds nothing in the caches."""
    other, found = torch.zeros(32 * 2**20), []
    for _ in range(calls):
        other.add_(1)
        start = time.perf_counter()
        check()
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)


class Stopwatch:
    """Adds up what it is around, of one step."""

    def __init__(self):
        self.seconds, self.steps = 0.0, []

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *_):
        self.seconds += time.perf_counter() - self.start

    def around(self, function):
        """The same function, timed."""

        def run(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def around_ends(self, manager):
        """What entering and leaving takes, not what is inside."""
        with self:
            manager.__enter__()
        yield
        with self:
            manager.__exit__(None, None, None)

    def next_step(self):
        """A step is over."""
        self.steps.append(self.seconds)
        self.seconds = 0.0


def microseconds_in_steps(engine, batches):
    """Of each check, the median over steps."""
    compiler = engine._compiler
    values, data, calls = Stopwatch(), Stopwatch(), Stopwatch()
    one, that_holds = compiler.call, compilers.that_holds
    compilers.that_holds = values.around(that_holds)
    compiler.data.check = data.around(compiler.data.check)
    compiler.watch.runs = calls.around(compiler.watch.runs)
    compiler.call = lambda *args: calls.around_ends(calls.around(one)(*args))
    for number in range(STEPS):
        engine.step(batches[number % len(batches)])
        for watch in (values, data, calls):
            watch.next_step()
    compilers.that_holds = that_holds
    names = ("values that code reads", "assigned data", "calls of other ranks")
    found = (statistics.median(watch.steps) * 1e6 for watch in (values, data, calls))
    return dict(zip(names, found, strict=True))


def with_and_without(engine, batches):
    """Milliseconds of steps with checks of values and of assigned data, and without, in turns of two."""
    that_holds, data = compilers.that_holds, engine._compiler.data
    check, found = data.check, {"with": [], "without": []}
    for number in range(4 * STEPS):
        name = ("with", "without")[number // 2 % 2]
        on = name == "with"
        compilers.that_holds = that_holds if on else lambda known, _: next(iter(known))
        data.check = check if on else lambda: None
        start = time.perf_counter()
        engine.step(batches[number % len(batches)])
        if number % 2:  # the first of two finds what the other kind left
            found[name].append((time.perf_counter() - start) * 1e3)
    compilers.that_holds, data.check = that_holds, check
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {**medians, "ratio": medians["with"] / medians["without"]}


def measure(name):
    """On a rank: what is checked -> microseconds."""
    torch.set_num_threads(1)
    model = make_model(SIZES[name], 512)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="zero3", lowering="eager")
    batches = make_batches(SIZES[name], 512, int(os.environ["RANK"]))
    batch = batches[0]
    for _ in range(3):  # from the next one on nothing is compared that was not written to
        engine.step(batch)
    compiler, local = engine._compiler, flatten_batch(batch, engine._device)
    compiled = compiler.entry("step", local)

    def calls():
        with compiler.call("step", local):
            compiler.watch.runs(compiled.digest)

    def values():
        assert that_holds([compiled], compiler.capturing) is compiled

    def written():
        model.unread = object()
        values()

    checks = {
        "values that code reads": values,
        "written to": written,
        "assigned data": compiler.data.check,
        "calls of other ranks": calls,
        "modules, parameters, modes, hooks": compiler._watched.look,
    }
    found = {name: microseconds(check) for name, check in checks.items()}
    cold = {name: microseconds_behind_other_memory(check) for name, check in checks.items()}
    return {
        "parameters": len(list(model.parameters())),
        **found,
        "behind other memory": cold,
        "steps with and without": with_and_without(engine, batches),
        "in steps": microseconds_in_steps(engine, batches),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), metavar="A,B")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    for name in options.sizes.split(","):
        rows[name] = launcher.launch(measure, name, ranks=2)[0]
        print(name, json.dumps(rows[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
