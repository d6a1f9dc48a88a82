"""``engine.replan`` in one process: budgets, what cannot be planned again, what else runs meanwhile."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.api.replan import NOT_IN_GRAPHS, ONLY_STEPS
from stepgraph.cost.calibration import UNCALIBRATED
from stepgraph.errors import RecompilationError, UsageError
from tests.end_to_end.replanning import MACHINE, OnDevice, batch_of, calibrated, engine_of, times

LAYERS, ROWS = 4, 256


class Heavier(OnDevice):
    """Its allocator counts more bytes than the cost model does."""

    sees_all = True
    factor = 1.0

    def watched(self, run: Any, held: Any, batch: Any, lowering: str) -> Any:
        return run(), round(self._foreseen().peak_bytes * self.factor)


@pytest.fixture(autouse=True)
def machine():
    with calibrated(MACHINE):
        yield


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(LAYERS))
    )


def made(budget: str | None = None, factor: float = 1.0, **settings: Any) -> stepgraph.Engine:
    settings = {"plan": "ddp", "memory": budget} | settings
    engine = engine_of(deep(), **settings)
    engine._meter = meter = Heavier(engine, times())
    meter.factor = factor
    return engine


def run(engine: stepgraph.Engine, steps: int, rows: int = ROWS) -> list[float]:
    return [engine.step(batch_of(step, 1, 0, rows)).item() for step in range(steps)]


def peak_with_all_kept() -> int:
    engine = made("none")
    run(engine, 1)
    return engine._meter._foreseen().peak_bytes  # type: ignore[attr-defined]


def test_a_peak_over_the_budget_is_corrected_and_more_is_recomputed():
    budget = int(1.1 * peak_with_all_kept())
    engine = made(f"budget:{budget}", factor=1.4)
    engine.replan(after=1)
    losses = run(engine, 6)
    (one,) = engine.stats.replans
    assert one.changed and "was over the budget" in one.why
    assert one.correction.memory == pytest.approx(1.4, rel=0.01)
    assert one.measured.peak_bytes > budget
    predicted = engine.plan.predicted
    assert predicted is not None and 1.39 * predicted.peak_bytes <= budget
    kept = engine.plan.decisions["step"].memory
    assert kept is not None and kept.recompute
    assert losses == run(made("none"), 6)
    assert "its peak is" in engine.report()


def test_room_that_was_not_seen_is_used():
    budget = int(0.6 * peak_with_all_kept())
    with calibrated(UNCALIBRATED):  # where to recompute takes time
        engine = made(f"budget:{budget}", factor=0.5)
        engine._meter.costs = UNCALIBRATED  # type: ignore[attr-defined]
        engine.replan(after=1)
        losses = run(engine, 5)
    (one,) = engine.stats.replans
    assert one.changed and one.correction.memory == pytest.approx(0.5, rel=0.01)
    kept = engine.plan.decisions["step"].memory
    assert kept is not None and not kept.recompute
    assert losses == run(made("none"), 5)


def test_where_nothing_fits_the_plan_stays_and_the_report_says_so():
    engine = made(f"budget:{int(1.1 * peak_with_all_kept())}", factor=10.0)
    run(engine, 1)
    before = engine.plan
    engine.replan(after=1)
    run(engine, 4)
    (one,) = engine.stats.replans
    assert not one.changed and "there is none (no plan fits" in one.why
    assert engine.plan == before and len(engine.stats.recompiles) == 0


def test_by_the_clock_of_this_machine():
    engine = engine_of(deep(), plan="ddp", memory="auto")
    run(engine, 1)
    engine.replan(after=3)
    losses = run(engine, 6)
    (one,) = engine.stats.replans
    assert one.measured.communication_ms is None and one.steps == 3
    # All but what a kernel takes inside itself.
    assert 0.8 * one.predicted.peak_bytes <= one.measured.peak_bytes
    assert one.measured.peak_bytes <= 1.05 * one.predicted.peak_bytes
    assert not one.changed  # everything is kept already
    other = engine_of(deep(), plan="ddp", memory="none")
    run(other, 1)
    assert losses == run(other, 6)


@pytest.mark.slow
def test_old_programs_are_let_go():
    engine = made(f"budget:{int(1.1 * peak_with_all_kept())}", factor=1.4)
    run(engine, 1)
    engine.evaluate(batch_of(0, 1, 0, ROWS))
    old = [weakref.ref(program) for program in engine.programs.values()]
    engine.replan(after=1)
    run(engine, 3)
    assert engine.stats.replans[0].changed and not engine.programs
    gc.collect()
    assert [program() for program in old] == [None] * len(old)
    before = engine.evaluate(batch_of(0, 1, 0, ROWS)).item()
    run(engine, 1)
    assert engine.evaluate(batch_of(0, 1, 0, ROWS)).item() != before
    assert {*engine.programs} == {"step", "evaluate"}


def test_each_shape_is_measured_by_itself():
    engine = made("auto")
    engine.replan(after=2)
    for step in range(4):
        run(engine, 1, rows=64 if step % 2 else ROWS)
    assert not engine.stats.replans
    for rows in (64, ROWS, 64, ROWS):  # of 64 rows two are timed before there are two of the others
        assert not engine.stats.replans or engine.stats.steps == 7
        run(engine, 1, rows)
    (one,) = engine.stats.replans
    assert one.step == 7 and one.steps == 2


@pytest.mark.slow
def test_a_no_recompiles_block_forbids_what_it_would_compile():
    engine = made(f"budget:{int(1.1 * peak_with_all_kept())}", factor=1.4)
    engine.replan(after=1)
    with stepgraph.no_recompiles(after=1):
        run(engine, 3)
        with pytest.raises(RecompilationError, match="planned again, for costs that were measured"):
            run(engine, 1)
    run(engine, 1)


def test_the_split_use_is_not_measured_and_says_so():
    engine = made("auto")
    engine.replan(after=1)
    for step in range(4):
        engine.backward(engine(batch_of(step, 1, 0, ROWS)))
        engine.optimizer_step()
    assert engine.notes.count(ONLY_STEPS) == 1 and not engine.stats.replans
    run(engine, 3)
    assert len(engine.stats.replans) == 1


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        print(end="") if x.sum().item() > 1e9 else None
        return self.layer(x)


def test_a_model_that_runs_graph_by_graph_is_not_planned_again():
    engine = engine_of(Breaks(), plan="ddp", memory="full")
    with pytest.raises(UsageError, match="there is nothing to plan again"):
        engine.replan(after=1)
    engine._compiler.plan = engine._compiler.plan.under(memory="auto", device="cpu")
    engine.replan(after=1)
    engine._compiler.plan = engine._compiler.plan.under(memory="full")
    run(engine, 2)
    assert engine.notes.count(NOT_IN_GRAPHS) == 1 and not engine.stats.replans
    engine._compiler.plan = engine._compiler.plan.under(memory="auto")
    with pytest.raises(UsageError, match="graph by graph"):
        engine.replan(after=1)


@pytest.mark.parametrize("after", [0, -1, True, 2.5, "3"])
def test_how_many_steps_must_be_a_number_of_them(after):
    with pytest.raises(UsageError, match="positive whole number of steps"):
        made("auto").replan(after=after)


def test_what_would_be_the_same_again_is_an_error_that_says_what_to_give():
    with pytest.raises(UsageError, match="(?s)'ddp'.*'full'.*memory=\"auto\""):
        made("full").replan(after=1)


def test_placements_are_not_moved_under_an_optimizer_of_the_callers():
    engine = engine_of(deep(), optimizer=None, plan="auto")
    with pytest.raises(UsageError, match="without an optimizer"):
        engine.replan(after=1)
    engine = engine_of(deep(), optimizer=None, plan="ddp", memory="auto")
    engine.replan(after=1)
    run(engine, 3)
    assert len(engine.stats.replans) == 1
