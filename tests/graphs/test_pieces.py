"""Where something cannot be captured, the rest is: in the largest pieces, told once."""

from __future__ import annotations

import logging
import operator

import pytest
import torch

from stepgraph import torch_internals
from stepgraph.errors import StrictError
from stepgraph.lowering.eager import EAGER
from stepgraph.lowering.graphs.obstacles import obstacles_within
from stepgraph.lowering.graphs.pieces import stretches
from stepgraph.planning.target import usual_target
from tests.graphs.programs import CUDA, traced
from tests.graphs.training import assert_same, batch, start, train

aten = torch.ops.aten
STEPS = 8


def most_frequent(x):
    """What a capture refuses, in the middle of a model that learns through it."""
    return x + torch.mode(x.detach().round())[0][:, None]


def test_the_rest_is_captured_and_what_it_computes_is_the_same(recorder):
    expected = train("eager", STEPS, most_frequent)
    found = train("cuda_graph_eager", STEPS, most_frequent)
    assert_same(found, expected)
    # Two obstacles: before, between and behind them. The evaluation ran once, which is its warm-up.
    assert [graph.replays for graph in recorder.captures] == [STEPS - 1] * 3
    assert sum(len(graph.rows) for graph in recorder.captures) > 60


@pytest.mark.parametrize(("memory", "micro_batches"), [("full", 2)])
def test_so_it_is_recomputed_and_in_micro_batches(recorder, memory, micro_batches):
    how = {"memory": memory, "micro_batches": micro_batches, "plan": "zero1"}
    assert_same(
        train("cuda_graph_eager", STEPS, most_frequent, **how),
        train("eager", STEPS, most_frequent, **how),
    )
    assert len(recorder.captures) == 6  # three of each program


def test_it_is_told_once_what_is_not_captured_and_why(recorder, caplog):
    with caplog.at_level(logging.WARNING, "stepgraph"):
        found = train("cuda_graph_eager", STEPS, most_frequent)
    told = [r.getMessage() for r in caplog.records if "captured in pieces" in r.getMessage()]
    assert len(told) == len(set(told)) == 2  # of the step and of the evaluation
    first = told[0].replace("test_pieces.py:", "test_pieces.py: line ")
    assert first.startswith(
        "cuda_graph_eager: program 'step' is captured in pieces, and 2 of its operations run between them: "
        "its kernel waits for the device, or computes on the host (test_pieces.py: line "
    )
    assert "in most_frequent: return x + torch.mode(" in first
    report = found.engine.report()
    assert told[0] in report
    assert "CUDA graphs and what runs between" in report


def test_forced_whole_it_is_an_error(recorder):
    engine = start("cuda_graph_eager", most_frequent, strict=True)
    with pytest.raises(StrictError, match="captured in pieces"):
        engine.step(batch(0))


def test_a_report_says_that_all_is_one_graph(recorder):
    engine = start("cuda_graph_eager", strict=True)
    engine.step(batch(0))
    (line,) = [line for line in engine.report().splitlines() if "program step:" in line]
    assert line.endswith("a rank, one CUDA graph")


# -- stretches of a Program


def obstructed(program):
    return {node: True for node in obstacles_within(program, CUDA)}


def shown(parts):
    return [
        (part.captured, [str(n.target).split(".")[1] for n in part.program.operations()])
        for part in parts
    ]


def test_views_are_taken_anew_where_they_are_read():
    def function(x):
        shown = aten.t.default(aten.tanh.default(x))
        counted = aten.histc.default(x, 4)
        return aten.mm.default(shown, shown) + counted

    program = traced(function, (4, 4))
    parts = stretches(program, obstructed(program))
    assert shown(parts) == [
        (True, ["tanh", "t"]),
        (False, ["histc"]),
        (True, ["t", "mm", "add"]),
    ]
    tanh = next(program.operations())
    assert parts[0].made == [tanh] and tanh in parts[2].given


def test_a_collective_around_an_obstacle_is_not_captured():
    def function(x):
        started = torch_internals.ALL_REDUCE(x, "sum", "dp")
        counted = aten.histc.default(aten.tanh.default(x), 4)
        return torch_internals.WAIT(started) + counted

    program = traced(function, (4, 4))
    assert shown(stretches(program, obstructed(program))) == [
        (False, ["all_reduce"]),
        (True, ["tanh"]),
        (False, ["histc", "wait_tensor"]),
        (True, ["add"]),
    ]


def test_one_of_several_results_is_with_what_computes_it():
    def function(x):
        values, places = aten.mode.default(x)
        y = aten.tanh.default(x)
        return y + values, places

    program = traced(function, (4, 4))
    parts = stretches(program, obstructed(program))
    assert [part.captured for part in parts] == [False, True]
    assert len(parts[0].made) == 2


@pytest.mark.parametrize("at", [[], [0], [2], [3], [1, 4], [0, 1, 2, 3, 4]])
def test_stretches_one_after_the_other_are_the_program(at):
    """Wherever it is divided, and whatever is written in place on the way."""

    def function(x, y):
        z = aten.tanh.default(aten.t.default(x))
        written = aten.copy_.default(y, z)
        values, _ = aten.sort.default(aten.t.default(written))
        return values + aten.mm.default(z, y)

    program = traced(function, (4, 4), (4, 4))
    views = (aten.t.default, operator.getitem)
    computed = [n for n in program.operations() if n.target not in views]
    parts = stretches(program, {computed[i]: True for i in at})
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    expected = function(x, y.clone())
    held = dict(zip(program.placeholders, (x, y), strict=True))
    for part in parts:
        run = EAGER.make(part.program, usual_target("cpu"))
        held |= zip(part.made, run([held[node] for node in part.given]), strict=True)
    (result,) = program.results
    assert torch.equal(held[result], expected)
    assert all(part.captured for part in parts) == (not at)
