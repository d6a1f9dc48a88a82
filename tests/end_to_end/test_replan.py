"""``engine.replan`` on two gloo ranks: what is wrong by 2 x is corrected, and the same bits go on.

What steps take is what the cost model says of a machine that is twice as slow as the calibration has it
(``OnDevice``), or what a clock says; everything else is real.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.planning.file import load_plan, plan_from_json, save_plan
from tests.end_to_end.replanning import (
    MACHINE,
    OnDevice,
    batch_of,
    calibrated,
    engine_of,
    layers,
    times,
    whole,
)

# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)
STEPS, FEW, DROPOUT = 9, 5, 0.25


def trained(
    ask: tuple[int, ...] = (),
    true: Any = None,
    slower: tuple[float, ...] = (1.0, 1.0),
    steps: int = FEW,
    saved: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """One rank of a run with dropout and a scheduler, which asks for a replan before some of its steps."""
    rank = int(os.environ["RANK"])
    model = layers(DROPOUT)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    engine = engine_of(model, optimizer=optimizer, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if true is not None:
        engine._meter = OnDevice(engine, true, slower[rank])
    plans, parameters, losses = [], dict(model.named_parameters()), []
    for step in range(steps):
        if step in ask:
            engine.replan(after=2)
        losses.append(engine.step(batch_of(step, 2, rank)).item())
        scheduler.step()
        plans.append(engine.plan.decides)
    evaluated = engine.evaluate(batch_of(0, 2, rank)).item() if steps == STEPS else None
    same = all(engine.model.get_parameter(name) is p for name, p in parameters.items())
    state = whole(engine)
    again = gone_on(engine) if saved else None
    return {
        "losses": losses, "evaluated": evaluated, "state": state, "plans": plans, "same": same,
        "replans": engine.stats.replans, "plan": engine.plan.to_json(), "again": again,
        "report": engine.report(), "recompiles": engine.stats.recompiles,
        "compiles": engine.stats.compiles,
    }  # fmt: skip


def gone_on(engine: stepgraph.Engine) -> tuple[list[float], list[float]]:
    """Losses of two more steps: of this engine, and of a new one under a preset that loads its save."""
    rank = int(os.environ["RANK"])
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    engine.save(Path(folder[0]) / "saved")
    model = layers(DROPOUT)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1.0, momentum=0.9)
    other = engine_of(model, optimizer=optimizer, plan="zero3")
    other.load(Path(folder[0]) / "saved")
    batches = [batch_of(step, 2, rank) for step in (STEPS, STEPS + 1)]
    mine, theirs = ([e.step(batch).item() for batch in batches] for e in (engine, other))
    return mine, theirs


def moved(
    presets: tuple[str, ...], micro_batches: int
) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """A run that goes on under one preset after the other, on uneven shards of AdamW's states."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.GELU(), torch.nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = engine_of(model, optimizer=optimizer, plan=presets[0], micro_batches=micro_batches)
    losses, placed = [], []
    for number, preset in enumerate(presets):
        if number:
            request = replace(engine.plan.request, placement=preset)
            engine._compiler.change_plan(replace(engine.plan, request=request, decisions={}))
        for _ in range(6 // len(presets)):
            losses.append(engine.step(batch_of(len(losses), 2, rank, rows=16)).item())
        placed.append(str(model[0].weight.placements))
    return losses, whole(engine), placed


QUICK: dict[str, dict[str, Any]] = {
    "never": {"steps": STEPS},
    "wrong by 2 x": {
        "ask": (0, 5), "true": times(compute=2.0), "steps": STEPS, "saved": True,
    },
    "right": {"ask": (0, 5), "true": times(), "steps": STEPS},
}  # fmt: skip
SLOW: dict[str, dict[str, Any]] = {
    "never": {},
    "one rank slow": {"ask": (0,), "true": times(), "slower": (1.0, 8.0)},
    "sends slowly": {"ask": (0,), "true": times(compute=2.0, communication=2.0)},
    "by the clock": {"ask": (0,)},
}
PRESETS = ("ddp", "zero3", "zero1")


def every(scenarios: dict[str, dict[str, Any]], micro_batches: int) -> dict[str, Any]:
    logging.disable()
    with calibrated(MACHINE):
        found: dict[str, Any] = {name: trained(**given) for name, given in scenarios.items()}
        found["moved"] = moved(PRESETS, micro_batches)
        found["not moved"] = moved(PRESETS[:1], micro_batches)
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(every, QUICK, 1, ranks=2)


@pytest.fixture(scope="module")
def more():
    return launch(every, SLOW, 2, ranks=2)


def of_all(ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """A scenario, in which the ranks agree."""
    first, second = (found[name] for found in ranks)
    for plan in (first["plan"], second["plan"]):
        plan["notes"] = []  # the first rank's on how it decided
    for key in ("losses", "evaluated", "plans", "replans", "plan"):
        assert first[key] == second[key], key
    return first


def check_goes_on(found: dict[str, Any], never: dict[str, Any]) -> None:
    assert found["losses"] == never["losses"][: len(found["losses"])] and found["same"]
    if len(found["losses"]) < STEPS:
        return
    assert found["evaluated"] == never["evaluated"]
    assert found["state"].keys() == never["state"].keys()
    for name, value in never["state"].items():
        assert torch.equal(found["state"][name], value), name


def test_a_model_that_is_wrong_by_2_x_is_corrected_and_the_plan_changes_once(ranks):
    found = of_all(ranks, "wrong by 2 x")
    check_goes_on(found, of_all(ranks, "never"))
    first, second = found["replans"]
    assert first.correction.compute == pytest.approx(2.0, rel=0.01)
    assert first.correction.communication == 1.0
    before, after = first.step_ms
    assert first.measured.step_ms == pytest.approx(before, rel=0.01) and before > 1.05 * after
    assert first.changed and found["plans"] == ["ddp"] * 3 + ["zero1"] * 6
    assert not second.changed and second.correction is None
    assert second.why == "the cost model is right"
    # Once for the step, once more under the new plan, and once for the evaluation.
    assert found["compiles"] == 3 and len(found["recompiles"]) == 1
    assert "planned again" in found["recompiles"][0]


def test_what_was_found_is_in_the_report_and_travels_with_the_plan(ranks, tmp_path):
    found = of_all(ranks, "wrong by 2 x")
    assert "replan after step 4 (2 timed" in found["report"]
    assert "the plan changed: corrected: compute x 2" in found["report"]
    assert "the plan stays: the cost model is right" in found["report"]
    plan = plan_from_json(found["plan"])
    assert plan.request.correction == found["replans"][0].correction
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").request == plan.request
    assert "evaluate" in plan.decisions and plan.predicted is not None


def test_a_checkpoint_of_a_run_that_was_planned_again_goes_on_elsewhere(ranks):
    for found in ranks:
        mine, theirs = found["wrong by 2 x"]["again"]
        assert mine == theirs


def test_a_model_that_is_right_changes_nothing(ranks):
    found, never = of_all(ranks, "right"), of_all(ranks, "never")
    check_goes_on(found, never)
    assert [(one.changed, one.correction) for one in found["replans"]] == [(False, None)] * 2
    assert found["plan"] == never["plan"] and not found["recompiles"]


def test_states_move_to_where_another_plan_has_them(ranks):
    for found in ranks:
        losses, state, placed = found["moved"]
        expected, whole_state, _ = found["not moved"]
        assert losses == expected and len(set(placed)) == 2
        for name, value in whole_state.items():
            assert torch.equal(state[name], value), name


@pytest.mark.slow
def test_accumulators_are_made_anew_where_another_plan_has_them(more):
    for found in more:
        losses, state, _ = found["moved"]
        expected, whole_state, _ = found["not moved"]
        # zero3 reduces each micro-batch's gradients, ddp their sum.
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, value in whole_state.items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.slow
def test_the_slowest_rank_counts(more):
    found = of_all(more, "one rank slow")
    check_goes_on(found, of_all(more, "never"))
    (one,) = found["replans"]
    assert one.measured.step_ms == pytest.approx(8 * one.predicted.step_ms, rel=0.01)
    assert one.changed and one.correction.compute > 7


@pytest.mark.slow
def test_a_correction_that_another_plan_would_not_gain_by_stays_with_the_plan(more):
    found, never = of_all(more, "sends slowly"), of_all(more, "never")
    check_goes_on(found, never)
    (one,) = found["replans"]
    factors = one.correction.compute, one.correction.communication
    assert not one.changed and factors == pytest.approx((2.0, 2.0), rel=0.01)
    plan, before = plan_from_json(found["plan"]), plan_from_json(never["plan"])
    assert plan.request == replace(before.request, correction=one.correction)
    assert plan.decisions == before.decisions and not found["recompiles"]


@pytest.mark.slow
def test_by_the_clock_the_cost_model_then_says_what_was_measured(more):
    found = of_all(more, "by the clock")
    check_goes_on(found, of_all(more, "never"))
    (one,) = found["replans"]
    assert one.measured.communication_ms and one.correction is not None
    assert one.step_ms[0] == pytest.approx(one.measured.step_ms, rel=0.2)
