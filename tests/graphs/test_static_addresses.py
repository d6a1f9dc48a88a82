"""What a graph needs of a run, on the host: all stays where it is, and counters go as they should."""

from __future__ import annotations

import pytest
import torch

from stepgraph.runtime.batches import flatten_batch
from tests.graphs.static import StaticAddresses, place
from tests.graphs.training import batch, start

STEPS, SAVED, LOADED, MICRO = 50, 20, 30, 2


def run(lowering, folder):
    """50 steps, of which 20 to 30 are done twice: a checkpoint is loaded in the middle."""
    engine = start(lowering, memory="full", micro_batches=MICRO)
    schedule = torch.optim.lr_scheduler.StepLR(engine._optimizer, 7, 0.8)
    losses, learning_rates, step, loaded = {}, {}, 0, False
    again = []
    where = None
    while step < STEPS:
        loss = engine.step(batch(step)).item()
        learning_rates.setdefault(step, engine._optimizer.param_groups[0]["lr"])
        if step in losses:
            again.append((losses[step], loss))
        losses[step] = loss
        schedule.step()
        now = [place(p.to_local()) for p in engine.model.parameters()]
        where = where or now
        assert now == where, "a parameter that the user holds moved"
        step += 1
        assert engine.stats.steps == step
        if step % 10 == 0:
            engine.evaluate(batch(1000))
        if step == SAVED and not loaded:
            engine.save(folder, extra={"schedule": schedule})
        if step == LOADED and not loaded:
            engine.load(folder, extra={"schedule": schedule})
            step, loaded = SAVED, True
    assert len(again) == LOADED - SAVED and all(one == other for one, other in again)
    assert len(set(learning_rates.values())) == 8
    return engine, losses


def check(lowering, folder, monkeypatch):
    watch = StaticAddresses(monkeypatch)
    engine, losses = run(lowering, folder)
    order = [*range(LOADED), *range(SAVED, STEPS)]
    expected = []
    for step in order:  # an evaluation draws nothing
        expected += [(0, step, number) for number in range(MICRO)]
    assert watch.seeds == expected
    assert watch.runs.count("evaluate") == len(order) // 10
    counters = {
        tensor.item()
        for role, tensor in engine._state.tensors.items()
        if getattr(role, "key", "") == "step"
    }
    assert counters == {STEPS}
    return losses


def test_eagerly(tmp_path, monkeypatch):
    check("eager", tmp_path, monkeypatch)


def test_captured(tmp_path, monkeypatch, recorder):
    losses = check("cuda_graph_eager", tmp_path, monkeypatch)
    assert recorder.events.count("capture") == 3
    monkeypatch.undo()
    _, expected = run("eager", tmp_path / "other")
    assert losses == expected


@pytest.mark.slow
@pytest.mark.xdist_group("graphs under inductor")
def test_compiled(tmp_path, monkeypatch):
    check("inductor", tmp_path, monkeypatch)


def test_the_check_sees_what_moves(tmp_path, monkeypatch):
    StaticAddresses(monkeypatch)
    engine = start("eager")
    engine.step(batch(0))
    held = next(t for t in engine._state.tensors.values() if t.dim() == 2)
    held.data = held.detach().clone()
    with pytest.raises(AssertionError, match="moved"):
        engine.step(batch(1))


def test_the_check_sees_state_that_is_returned(monkeypatch):
    StaticAddresses(monkeypatch)
    engine = start("eager")
    engine.step(batch(0))
    local = flatten_batch(batch(0), torch.device("cpu"))
    lowered = engine._compiler.entry("step", local).programs["step"]
    lowered.execute = lambda arguments: [arguments[0] for _ in lowered.outputs]
    with pytest.raises(AssertionError, match="part of state"):
        engine.step(batch(1))
