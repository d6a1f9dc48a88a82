"""What is predicted of an engine's step, and what its step holds alive (LiveMemory)."""

import pytest
import torch

from stepgraph import Engine
from stepgraph.cost.calibration import UNCALIBRATED
from stepgraph.cost.devices import find_device
from stepgraph.pipeline import executed, foresee
from stepgraph.program.collectives import is_collective
from stepgraph.program.driver import PassDriver
from tests.live_memory import LiveMemory, live_step
from tests.sampling import sampled
from tests.support import (
    adamw,
    bound,
    compiled,
    mlp,
    regression_batch,
    tiny_llama,
    token_batch,
)


def counted_peak(engine, batch):
    """Bytes alive at most during one real step, inputs and state included."""
    engine.step(batch)
    return live_step(engine, batch).peak


@pytest.mark.parametrize("memory", sampled(["full", "none"]))
def test_the_predicted_peak_is_what_a_real_step_holds(memory):
    model, batch = tiny_llama(2), token_batch(length=24)
    engine = Engine(
        model, optimizer=adamw(model), mesh="dp=1", plan="ddp", memory=memory, lowering="eager"
    )
    measured = counted_peak(engine, batch)
    found = foresee(engine.programs, UNCALIBRATED, "eager")
    assert found.peak_bytes == pytest.approx(measured, rel=0.01)


def test_live_memory_counts_storages_once_and_forgets_what_is_gone():
    held = torch.ones(1000)
    with LiveMemory([held, held.view(10, 100)]) as live:
        assert live.now == 4000
        made = held + 1
        view = made.view(10, 100)
        assert live.now == 8000
        del made
        assert live.now == 8000
        del view
        assert live.now == 4000
        assert (held * 2).sum().item() == 2000
    assert live.peak == 8004


def first_rank(model, batch, **options):
    """What the first rank runs of a step."""
    step = compiled(model, batch, adamw(model), **options).programs["step"]
    return {"step": bound(step)[0]}


def calls(program):
    return sum(map(is_collective, program.operations()))


def test_a_forecast_is_made_from_what_ranks_run():
    model, batch = tiny_llama(2), token_batch()
    plain, merged = (
        first_rank(model, batch, ranks=4, schedule=schedule) for schedule in ("none", "auto")
    )
    before = str(merged["step"])
    found = foresee(merged, find_device("h100"), "inductor")
    assert str(merged["step"]) == before
    run = calls(executed(merged["step"], "eager", {}, PassDriver()))
    assert sum(row["count"] for row in found.collectives.values()) == run < calls(plain["step"])


def test_fused_kernels_move_less_than_operations_one_by_one():
    model, batch = mlp(), regression_batch(rows=1200)
    programs = first_rank(model, batch)
    times = [foresee(programs, UNCALIBRATED, name).step_ms for name in ("inductor", "eager")]
    assert times[0] < times[1]
