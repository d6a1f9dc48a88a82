"""Collectives, bytes and FLOPs of a step are what theory says, counted on the placed programs."""

import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepgraph.capture.step import Captured
from stepgraph.planning.plan import preset_plan
from stepgraph.program import roles
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.layout import chunk_size
from stepgraph.report.text import collective_counts
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.training import CLIP, TOKENS, adamw, llama_batch, tiny_llama
from tests.one_process import OneProcessRun

RANKS = 4
# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)


captured: dict[int, Captured] = {}


@functools.cache
def run_once(preset, *, memory=None, micro_batches=1, ranks=RANKS):
    model = tiny_llama()
    run = OneProcessRun(
        model,
        optimizer=adamw(model.parameters()),
        mesh=f"dp={ranks}",
        plan=preset_plan(preset, parse_mesh(f"dp={ranks}"), schedule="none"),
        memory=memory,
        micro_batches=micro_batches,
        max_grad_norm=CLIP,
        captured=captured.get(micro_batches),
    )
    run.step(llama_batch(0))
    captured[micro_batches] = run.captured
    return run, dict(model.named_parameters())


def on_parameters(program):
    """(phase, kind) -> number, without single numbers (the loss, a count, a norm)."""
    counts = {}
    for node in program.operations():
        if is_collective(node) and node.meta["val"].dim():
            key = node.meta["phase"], KINDS[node.target]
            counts[key] = counts.get(key, 0) + 1
    return counts


def test_ddp_reduces_each_gradient_once():
    run, parameters = run_once("ddp")
    assert on_parameters(run.programs["step"]) == {("backward", "all_reduce"): len(parameters)}


@pytest.mark.parametrize("preset", ["zero1", "zero2"])
def test_zero1_and_zero2_scatter_each_gradient_and_gather_each_parameter_once(preset):
    run, parameters = run_once(preset)
    assert on_parameters(run.programs["step"]) == {
        ("backward", "reduce_scatter"): len(parameters),
        ("optimizer", "all_gather"): len(parameters),
    }


def test_zero3_gathers_each_parameter_once_in_forward_and_at_most_once_in_backward():
    run, parameters = run_once("zero3")
    counts = on_parameters(run.programs["step"])
    assert counts.pop(("backward", "all_gather")) <= len(parameters)
    assert counts == {
        ("forward", "all_gather"): len(parameters),
        ("backward", "reduce_scatter"): len(parameters),
    }


def test_zero3_with_recomputation_gathers_no_more_often():
    run, parameters = run_once("zero3", memory="full")
    assert on_parameters(run.programs["step"])["backward", "all_gather"] <= len(parameters)


@pytest.mark.parametrize(("preset", "per_micro_batch"), [("ddp", 0), ("zero1", 0), ("zero2", 1)])
def test_gradients_are_reduced_once_a_step_or_into_sharded_accumulators(preset, per_micro_batch):
    run, parameters = run_once(preset, micro_batches=4, ranks=2)
    accumulate = on_parameters(run.programs["accumulate"])
    reductions = sum(n for (_, kind), n in accumulate.items() if kind != "all_gather")
    assert reductions == per_micro_batch * len(parameters)
    kind = "all_reduce" if preset == "ddp" else "reduce_scatter"
    assert on_parameters(run.programs["step"])["backward", kind] == len(parameters)
    for role, value in zip(
        run.programs["step"].inputs, run.programs["step"].input_values, strict=True
    ):
        if isinstance(role, roles.Accumulator) and role.name.startswith("grad:"):
            (placement,) = value.placements
            assert placement.is_shard() if per_micro_batch else placement.is_partial()


def test_bytes_are_those_of_the_parameters():
    run, parameters = run_once("zero3")
    padded = sum(
        chunk_size(p.shape[0], RANKS) * RANKS * p[0].numel() * 4 for p in parameters.values()
    )
    counts = collective_counts(run.programs["step"])
    assert counts["forward", "all_gather"]["bytes"] == padded
    assert counts["backward", "reduce_scatter"]["bytes"] == padded // RANKS


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
def test_no_activation_is_communicated(preset):
    run, parameters = run_once(preset)
    shapes = {tuple(p.shape) for p in parameters.values()}
    padded = {(chunk_size(s[0], RANKS) * RANKS, *s[1:]) for s in shapes}
    shards = {(chunk_size(s[0], RANKS), *s[1:]) for s in shapes}
    for node in run.programs["step"].operations():
        if is_collective(node):
            shape = tuple(node.meta["val"].shape)
            assert shape == () or shape in shapes | padded | shards, node.meta["name"]


def matmul_flops(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(("options", "most"), [({}, 1.0), ({"memory": "full"}, 4 / 3)])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
def test_matrix_products_are_divided_over_the_ranks(preset, options, most):
    model = tiny_llama()
    whole = matmul_flops(lambda: model(**llama_batch(0)).loss.backward())
    run, _ = run_once(preset, **options)
    all_ranks = matmul_flops(lambda: run.step(llama_batch(1)))
    assert all_ranks <= most * whole * 1.001


def test_local_activations_have_the_rows_of_one_rank():
    run, _ = run_once("zero3")
    local_tokens = llama_batch(0)["input_ids"].shape[0] // RANKS * TOKENS
    for node in run.programs["step"].operations("forward"):
        value = node.meta["val"]
        if node.target is torch.ops.aten.mm.default:
            assert value.shape[0] == local_tokens, node.meta["name"]
