"""Memory falls as it should, counted on live tensors of a real (eager) run."""

import gc
from collections import Counter

import pytest
import torch

from stepgraph.capture.step import Captured
from stepgraph.cost.memory import memory_timeline
from stepgraph.planning.plan import preset_plan
from stepgraph.program import roles
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.training import CLIP, adamw, llama_batch, tiny_llama
from tests.one_process import OneProcessRun

captured: dict[int, Captured] = {}


def run_once(preset, ranks=4, memory=None, layers=2):
    model = tiny_llama(layers=layers)
    run = OneProcessRun(
        model,
        optimizer=adamw(model.parameters()),
        mesh=f"dp={ranks}",
        plan=preset_plan(preset, parse_mesh(f"dp={ranks}"), schedule="none"),
        memory=memory,
        max_grad_norm=CLIP,
        captured=captured.get(layers),
    )
    run.step(llama_batch(0))
    captured[layers] = run.captured
    return run


def state_bytes(run) -> Counter:
    """Bytes that the first rank holds between steps, by kind of state."""
    held: Counter = Counter()
    for role, parts in run._state.items():
        if isinstance(role, (roles.Param, roles.OptimizerState)):
            held[type(role).__name__] += parts[0].numel() * parts[0].element_size()
    return held


def test_zero3_holds_a_quarter_of_ddp_on_four_ranks():
    whole, quarter = run_once("ddp"), run_once("zero3")
    for kind, size in state_bytes(whole).items():
        # 101 and 10 rows do not divide by 4: their last shard is padded.
        assert state_bytes(quarter)[kind] == pytest.approx(size / 4, rel=0.05), kind
    gradients = [
        memory_timeline(run.programs["step"]).peak_of("gradients") for run in (whole, quarter)
    ]
    assert gradients[1] == pytest.approx(gradients[0] / 4, rel=0.05)


def test_the_timeline_counts_what_is_really_alive():
    run = run_once("zero3", ranks=1)
    program = run.programs["step"]
    timeline = memory_timeline(program)
    predicted = [sum(alive.values()) for alive in timeline.at]
    measured = live_bytes_of_interpretation(run, program)
    assert max(predicted) == pytest.approx(max(measured), rel=0.05)


def live_bytes_of_interpretation(run, program) -> list[int]:
    """Interprets the program and counts the storages that are alive after every operation."""
    values, measured = {}, []
    last = {}
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    for node in program.placeholders:
        role = program.inputs[program.placeholders.index(node)]
        parts = run._state.get(role)
        values[node] = parts[0] if parts else llama_batch(0)[role.name]
    inputs = set(values)
    for node in program.operations():
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
        storages = {}
        for value in values.values():
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        measured.append(sum(storages.values()))
        for source in node.all_input_nodes:
            if last[source] is node and source not in inputs and source not in program.results:
                values.pop(source, None)
    gc.collect()
    return measured


@pytest.mark.slow
def test_full_recomputation_halves_the_activation_peak_of_eight_layers():
    peaks = {
        memory: memory_timeline(run_once("ddp", 1, memory, layers=8).programs["step"])
        for memory in ("none", "full", "layers:2")
    }
    activations = {memory: timeline.peak_of("activations") for memory, timeline in peaks.items()}
    assert activations["full"] <= activations["none"] / 2
    assert activations["full"] < activations["layers:2"] < activations["none"]
    assert peaks["full"].peak("backward") < peaks["none"].peak("backward")
