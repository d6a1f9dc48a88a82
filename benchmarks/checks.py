"""What it costs a step to look whether anything changed: Python values, assigned data, other ranks' calls.

    python benchmarks/checks.py --sizes small,medium --json benchmarks/results/checks.json

Two gloo ranks; each check is called by itself some thousand times, in an engine that has compiled its step,
for Llamas of several depths. Microseconds a step, the median of rounds. Modules, parameters, modes, hooks
are looked at by all; in the same gather of words also what values were read from, and data: those two only
ask then what was found. ``values that were written to``: where something was written to what holds them
(and they are what they were). ``behind other memory``: the same, but 128 MiB are written before each call:
what a check reads, and the interpreter, are in no cache then. ``in steps``: what a check takes within steps
that train, where it finds what they leave (the clock is looked at just before, so that what is timed is the
check). ``steps with and without``: steps of one run, in turns with all checks, and only with that at
modules; the ratio of the medians, and the median of differences between neighbours, with its interval of
95 %.
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
from stepgraph.runtime.batches import flatten_batch

CALLS, ROUNDS, STEPS = 500, 9, 150
QUARTETS = 50  # times the steps of a size


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

    def warmed(self):
        """Itself, in the caches, which what it is around need not be."""
        seconds = self.seconds
        with self:
            pass
        self.seconds = seconds
        return self

    def around(self, function):
        """The same function, timed."""

        def run(*args, **kwargs):
            with self.warmed():
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def around_ends(self, manager):
        """What entering and leaving takes, not what is inside."""
        with self.warmed():
            manager.__enter__()
        yield
        with self.warmed():
            manager.__exit__(None, None, None)

    def next_step(self):
        """A step is over."""
        self.steps.append(self.seconds)
        self.seconds = 0.0


def microseconds_in_steps(engine, batches):
    """Of each check, the median over steps."""
    compiler = engine._compiler
    checks, watch = compiler.checks, compiler.watch
    alone, together, values, data, calls = (Stopwatch() for _ in range(5))
    found = {
        "modules, parameters, modes, hooks, alone": alone,
        "the same, and the next two with it": together,
        "values that code reads": values,
        "assigned data": data,
        "calls of other ranks": calls,
    }
    one = compiler.call
    with patched((checks, "look", alone.around(checks.watched.look))):
        for number in range(STEPS):
            engine.step(batches[number % len(batches)])
            alone.next_step()
    with patched(
        (checks, "look", together.around(checks.look)),
        (checks, "that_holds", values.around(checks.that_holds)),
        (checks, "check_data", data.around(checks.check_data)),
        (watch, "runs", calls.around(watch.runs)),
        (compiler, "call", lambda *args: calls.around_ends(calls.around(one)(*args))),
    ):
        for number in range(STEPS):
            engine.step(batches[number % len(batches)])
            for stopwatch in (together, values, data, calls):
                stopwatch.next_step()
    return {name: statistics.median(of.steps) * 1e6 for name, of in found.items()}


@contextlib.contextmanager
def patched(*places):
    """Within it, methods of objects are others."""
    for one, name, other in places:
        setattr(one, name, other)
    yield
    for one, name, _ in places:
        delattr(one, name)


def with_and_without(engine, batches, quartets):
    """Milliseconds of steps with the checks and without them, and microseconds between the two.

    Without them modules, parameters, modes and hooks are looked at, as ever.

    Args:
        quartets: of steps: two with the checks, two without. The second of two is timed: the first finds
            what the other kind left.
    """
    compiler, nothing, times = engine._compiler, contextlib.nullcontext(), ([], [])
    without = (
        (compiler.checks, "look", compiler.checks.watched.look),
        (compiler.checks, "that_holds", lambda known, _: known[0]),
        (compiler.checks, "check_data", lambda: None),
        (compiler, "call", lambda *_: nothing),
        (compiler.watch, "runs", lambda _: None),
    )
    with_them = [(one, name, getattr(one, name)) for one, name, _ in without]  # found as fast
    for number in range(4 * quartets):
        on = number // 2 % 2 == 0
        with patched(*(with_them if on else without)):
            start = time.perf_counter()
            engine.step(batches[number % len(batches)])
            seconds = time.perf_counter() - start
        if number % 2:
            times[not on].append(seconds)
    medians = [statistics.median(kind) for kind in times]
    apart = sorted(one - other for one, other in zip(*times, strict=True))
    off = round(0.98 * len(apart) ** 0.5)  # ranks of a median's interval of 95 %
    middle = len(apart) // 2
    return {
        "with": medians[0] * 1e3,
        "without": medians[1] * 1e3,
        "ratio": medians[0] / medians[1],
        "microseconds between": apart[middle] * 1e6,
        "of 95 %": [apart[middle - off] * 1e6, apart[middle + off] * 1e6],
    }


def measure(name):
    """On a rank: what is checked -> microseconds."""
    torch.set_num_threads(1)
    model = make_model(SIZES[name], 512)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="zero3", lowering="eager")
    batches = make_batches(SIZES[name], 512, int(os.environ["RANK"]))
    batch = batches[0]
    for _ in range(8):  # from the next one on nothing is compared that was not written to
        engine.step(batch)
    compiler, local = engine._compiler, flatten_batch(batch, engine._device)
    compiled = compiler.entry("step", local)

    def calls():
        with compiler.call("step", local):
            compiler.watch.runs(compiled.digest)

    def that_read():
        assert compiler.checks.that_holds([compiled], compiler.capturing) is compiled

    def written():
        model.unread = object()
        compiler.checks.look()
        that_read()

    checks = {
        "modules, parameters, modes, hooks, alone": compiler.checks.watched.look,
        "the same, and the next two with it": compiler.checks.look,
        "values that code reads": that_read,
        "assigned data": compiler.checks.check_data,
        "calls of other ranks": calls,
        "values that were written to": written,
    }
    found = {name: microseconds(check) for name, check in checks.items()}
    cold = {name: microseconds_behind_other_memory(check) for name, check in checks.items()}
    return {
        "parameters": len(list(model.parameters())),
        **found,
        "behind other memory": cold,
        "steps with and without": with_and_without(engine, batches, QUARTETS * SIZES[name].steps),
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
