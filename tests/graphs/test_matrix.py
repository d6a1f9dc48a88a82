"""Placements, what is kept, micro-batches: a captured step is the one that runs operator by operator."""

from __future__ import annotations

import pytest
import torch

import stepgraph
from tests.equivalence.planted import words
from tests.graphs.training import assert_same, train
from tests.support import mlp, regression_batch

STEPS = 20
PRESETS = {
    "ddp": "dp=1", "zero1": "dp=1", "zero2": "dp=1", "zero3": "dp=1", "hsdp": "replicate=1,shard=1",
    "tp+sp+zero3": "dp=1,tp=1",
}  # fmt: skip
FEW = [
    ("zero3", "full", 2),
    ("tp+sp+zero3", "layers:1", 1),
    ("zero3", "*=offload", 2),
    ("zero3", "optimizer=offload,*=offload", 2),
]
ALL = [
    (preset, memory, micro)
    for preset in PRESETS
    for memory in ("none", "full", "ops", "layers:1")
    for micro in (1, 2, 4)
]


def check_cell(recorder, preset, memory, micro_batches):
    how = {
        "plan": preset, "mesh": PRESETS[preset], "memory": memory, "micro_batches": micro_batches
    }  # fmt: skip
    expected = train("eager", STEPS, **how)
    assert not recorder.events
    found = train("cuda_graph_eager", STEPS, **how)
    assert_same(found, expected)
    assert found.engine.notes == expected.engine.notes
    # One graph each for the step, what comes before it of micro-batches, and the evaluation.
    replays = [graph.replays for graph in recorder.captures]
    runs = [STEPS, STEPS // 5] + [STEPS * (micro_batches - 1)] * (micro_batches > 1)
    assert sorted(replays) == sorted(count - 1 for count in runs)
    assert recorder.events.count("warm up") == recorder.events.count("capture") == len(replays)


@pytest.mark.parametrize(("preset", "memory", "micro_batches"), FEW)
def test_a_captured_step_is_the_step(recorder, preset, memory, micro_batches):
    check_cell(recorder, preset, memory, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "memory", "micro_batches"), [cell for cell in ALL if cell not in FEW]
)
def test_whatever_the_plan(recorder, preset, memory, micro_batches):
    check_cell(recorder, preset, memory, micro_batches)


def test_logits_in_pieces_are_captured(recorder):
    found = {}
    for lowering in ("eager", "cuda_graph_eager"):
        model, batch = words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how = {"plan": "ddp", "memory": "budget:64KiB", "lowering": lowering}
        engine = stepgraph.Engine(model, optimizer=optimizer, **how)
        losses = torch.stack([engine.step(batch) for _ in range(4)])
        assert engine.plan.decisions["step"].memory.pieces
        found[lowering] = losses, model.head.weight.full_tensor()
    assert all(map(torch.equal, *found.values()))
    assert [graph.replays for graph in recorder.captures] == [3]


def losses(lowering):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = stepgraph.Engine(model, optimizer=optimizer, plan="ddp", lowering=lowering)
    return torch.stack([engine.step(regression_batch(seed=step)) for step in range(4)])


def test_what_inductor_makes_is_captured_too(calling_recorder):
    assert torch.equal(losses("cuda_graph"), losses("inductor"))
    assert [graph.replays for graph in calling_recorder.captures] == [3]
