"""The meter counts seconds by its clock, and bytes as the tests' own count does."""

import itertools

import pytest
import torch

from stepgraph.cli.launcher import launch
from stepgraph.runtime.batches import flatten_batch
from stepgraph.runtime.meter import REPEATS, Meter
from stepgraph.runtime.ranks import largest
from tests.end_to_end.replanning import MACHINE, batch_of, calibrated, engine_of
from tests.live_memory import live_step

HOST = torch.device("cpu")


def test_seconds_are_the_clocks():
    ticks = itertools.count(step=3.0)
    assert Meter(HOST, lambda: next(ticks)).timed(lambda: "done") == ("done", 3.0)


@pytest.mark.parametrize("lowering", ["inductor", "cuda_graph", "cuda_graph_eager"])
def test_nobody_counts_the_bytes_of_compiled_code_on_the_host(lowering):
    meter = Meter(HOST)
    assert meter.watched(lambda: "done", [], [], lowering) == ("done", None)
    assert not meter.sees_all


def test_bytes_are_those_that_are_alive_at_once():
    engine = engine_of(plan="zero3", memory="none")
    whole = {"x": torch.randn(200, 64)}
    part = {"x": whole["x"][:50]}
    for _ in range(2):
        engine.step(part)
    step = engine._programs_of("step", leaves := flatten_batch(part, HOST))
    assert step is not None
    held = [one for one in step.programs["step"].arguments if one is not None]
    _, peak = Meter(HOST).watched(lambda: engine.step(part), held, leaves.leaves, "eager")
    assert peak == live_step(engine, {"x": part["x"].clone()}).peak  # the part alone counts


def timed_collectives() -> tuple[list[float | None], list[int]]:
    """Seconds by a clock that goes on by one at each look: each collective of the step, then none."""
    with calibrated(MACHINE):
        engine = engine_of(plan="ddp", memory="none")
        engine.step(batch_of(0, 2, torch.distributed.get_rank()))
        ticks = itertools.count()
        meter = Meter(HOST, lambda: float(next(ticks)))
        step, groups = engine.programs["step"], engine._ranks.groups
        found = [meter.communication([(step, times)], groups) for times in (1, 3)]
        found.append(meter.communication([], groups))
        return found, largest(engine._ranks, next(ticks))


def test_each_collective_is_timed_and_counts_as_often_as_it_runs():
    for found, looks in launch(timed_collectives, ranks=2):
        once, thrice, none = found
        # Of ddp: the gradients, all at once, and the loss.
        assert (once, thrice, none) == (2.0, 6.0, None)
        assert looks == [2 * 2 * 2 * REPEATS]
