"""What it costs a step to look whether anything changed: Python values, assigned data, other ranks' calls.

    python benchmarks/checks.py --sizes small,medium --json benchmarks/results/checks.json

Two gloo ranks; each check is called by itself some thousand times, in an engine that has compiled its step,
for Llamas of several depths. Microseconds a step, the median of rounds. Modules, parameters, modes, hooks
are looked at by all; in the same gather of words also what values were read from, and data: those two only
ask then what was found. ``values that were written to``: where something was written to what holds them
(and they are what they were). ``behind other memory``: the same, but 128 MiB are written before each call:
what a check reads, and the interpreter, are in no cache then. ``in steps``: what a check takes within steps
that train, where it finds what they leave (the clock is looked at just before, so that what is timed is the
check; what it takes around nothing is taken off). ``steps with and without``: steps of one run, in turns
with all checks, and only with that at modules: milliseconds and their ratio by the clock; and the median of
differences between neighbours, with its interval of 95 %, in CPU time of the thread that steps (waiting for
the other rank is none); beside it the same of steps with all checks and others with all checks.
"""

import argparse
import contextlib
import json
import os
import random
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
TURNS = 100  # times the steps of a size


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
        self.seconds, self.laps, self.steps = 0.0, 0, []

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
        self.laps += 1
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
        self.steps.append((self.seconds, self.laps))
        self.seconds, self.laps = 0.0, 0

    def microseconds(self, own=0.0):
        """Of a step, the median; less what each time took that was around nothing."""
        return statistics.median(seconds * 1e6 - laps * own for seconds, laps in self.steps)


def microseconds_in_steps(engine, batches):
    """Of each check, the median over steps; less what the stopwatch takes around an empty function."""
    compiler = engine._compiler
    checks, watch = compiler.checks, compiler.watch
    alone, together, values, data, calls, nothing = (Stopwatch() for _ in range(6))
    found = {
        "modules, parameters, modes, hooks, alone": alone,
        "the same, and the next two with it": together,
        "values that code reads": values,
        "assigned data": data,
        "calls of other ranks": calls,
    }
    one, empty = compiler.call, nothing.around(lambda: None)

    def call(*args):
        empty()
        return calls.around_ends(calls.around(one)(*args))

    with patched((checks, "look", alone.around(checks.watched.look))):
        for number in range(STEPS):
            engine.step(batches[number % len(batches)])
            alone.next_step()
    with patched(
        (checks, "look", together.around(checks.look)),
        (checks, "that_holds", values.around(checks.that_holds)),
        (checks, "check_data", data.around(checks.check_data)),
        (watch, "runs", calls.around(watch.runs)),
        (compiler, "call", call),
    ):
        for number in range(STEPS):
            engine.step(batches[number % len(batches)])
            for stopwatch in (together, values, data, calls, nothing):
                stopwatch.next_step()
    own = nothing.microseconds()
    return {name: of.microseconds(own) for name, of in found.items()} | {"of the stopwatch": own}


@contextlib.contextmanager
def patched(*places):
    """Within it, methods of objects are others."""
    before = [vars(one).get(name) for one, name, _ in places]
    for one, name, other in places:
        setattr(one, name, other)
    yield
    for (one, name, _), own in zip(places, before, strict=True):
        if own is None:
            delattr(one, name)
        else:
            setattr(one, name, own)


def with_and_without(engine, batches, rounds):
    """Milliseconds of steps with the checks and without them, and CPU microseconds between the two.

    Without them modules, parameters, modes and hooks are looked at, as ever. ``itself``: steps with them
    beside others with them, which shows what such a comparison can tell.

    Args:
        rounds: of each kind of step, on one batch and in a random order, two in a row, of which the second
            is timed: the first finds what the other kind left.
    """
    compiler, nothing = engine._compiler, contextlib.nullcontext()
    without = (
        (compiler.checks, "look", compiler.checks.watched.look),
        (compiler.checks, "that_holds", lambda known, _: known[0]),
        (compiler.checks, "check_data", lambda: None),
        (compiler, "call", lambda *_: nothing),
        (compiler.watch, "runs", lambda _: None),
    )
    with_them = [(one, name, getattr(one, name)) for one, name, _ in without]  # found as fast
    kinds = [with_them, without, with_them]
    wall, cpu = [[] for _ in kinds], [[] for _ in kinds]
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        batch = order.choice(batches)
        for kind in order.sample(range(len(kinds)), len(kinds)):
            with patched(*kinds[kind]):
                engine.step(batch)
                start = time.perf_counter(), time.thread_time()
                engine.step(batch)
                wall[kind].append(time.perf_counter() - start[0])
                cpu[kind].append(time.thread_time() - start[1])
    with_checks, bare = statistics.median(wall[0] + wall[2]), statistics.median(wall[1])
    both = [(one + other) / 2 for one, other in zip(cpu[0], cpu[2], strict=True)]
    return {
        "with": with_checks * 1e3,
        "without": bare * 1e3,
        "ratio": with_checks / bare,
        "CPU microseconds between": between(both, cpu[1]),
        "itself": between(cpu[0], cpu[2]),
    }


def between(ones, others):
    """The median of what ones take beyond their neighbours, in microseconds, and its interval of 95 %."""
    apart = sorted(one - other for one, other in zip(ones, others, strict=True))
    off, middle = round(0.98 * len(apart) ** 0.5), len(apart) // 2
    return {
        "median": apart[middle] * 1e6,
        "of 95 %": [apart[middle - off] * 1e6, apart[middle + off] * 1e6],
    }


def measure(name):
    """On a rank: what is checked -> microseconds."""
    torch.set_num_threads(1)
    model = make_model(SIZES[name], 512)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="zero3")
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
        "steps with and without": with_and_without(engine, batches, TURNS * SIZES[name].steps),
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
