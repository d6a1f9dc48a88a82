"""Real gloo ranks: the eager and the inductor lowering train as one process does."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import LaunchError
from tests.end_to_end.training import (
    CLIP,
    STEPS,
    adamw,
    compare,
    llama_batch,
    reference,
    tiny_llama,
)


def rank_part(batch, rank, ranks):
    """This rank's rows, as each rank of a data-parallel run brings them."""
    return {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}


def train(preset, memory, micro_batches, lowering, layers):
    """One rank of a run; returns losses and whole parameters."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    model = tiny_llama(layers, checkpoint=memory == "checkpoint")
    if rank:  # ranks start from the first one's values, whatever they bring
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    engine = stepgraph.Engine(
        model,
        optimizer=adamw(model.parameters()),
        plan=preset,
        memory="full" if memory == "full" else None,
        micro_batches=micro_batches,
        max_grad_norm=CLIP,
        lowering=lowering,
    )
    losses = [engine.step(rank_part(llama_batch(s), rank, ranks)).item() for s in range(STEPS)]
    evaluated = None
    if lowering == "eager" or preset == "zero3":  # one more program, which takes inductor long
        evaluated = engine.evaluate(rank_part(llama_batch(0), rank, ranks)).item()
    parameters = {n: p.detach().full_tensor() for n, p in engine.model.named_parameters()}
    notes = [note for note in engine.notes if "the whole forward is one block" not in note]
    assert engine.stats.compiles == (1 if evaluated is None else 2) and not notes
    return losses, parameters, evaluated


def train_and_count(cells, *options):
    """One rank: every cell in turn, and what came of inductor's cache."""
    return [train(*cell, *options) for cell in cells], Counter(counters["inductor"])


def check_cells(cells, ranks, lowering, layers=2):
    """In one launch: what takes time is starting ranks and compiling for the first time."""
    results, counts = zip(
        *launch(train_and_count, cells, lowering, layers, ranks=ranks), strict=True
    )
    for cell, found in zip(cells, zip(*results, strict=True), strict=True):
        for losses, parameters, evaluated in found:
            compare(losses, parameters, layers=layers)
            assert evaluated == found[0][2], cell
    return counts


EAGER = [("ddp", "none", 4), ("zero1", "full", 1), ("zero2", "checkpoint", 4), ("zero3", "full", 4)]


@pytest.mark.parametrize(
    ("cells", "layers"), [(EAGER[2:3], 1), pytest.param(EAGER, 2, marks=pytest.mark.slow)]
)
def test_two_ranks_under_the_eager_lowering(cells, layers):
    check_cells(cells, 2, "eager", layers)


# Every single setting occurs (zero1 under inductor: test_meshes_under_inductor.py); of one layer, for
# compiling takes long.
IN_CI = [("zero3", "full", 1)]


@pytest.mark.parametrize(
    ("cells", "hits"),
    [
        (IN_CI, 1),  # what is the same on both ranks is compiled by one
        # Of its two programs zero2's step is another on each.
        pytest.param([("zero2", "checkpoint", 4)], 1, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_under_inductor(cells, hits):
    counts = check_cells(cells, 2, "inductor", layers=1)
    assert not any(count["fxgraph_cache_bypass"] for count in counts)
    assert sum(count["fxgraph_cache_hit"] for count in counts) >= hits


# Every pair of settings of (preset, memory, micro-batches, ranks) occurs.
ALL_PAIRS = [
    ("ddp", "none", 1, 2), ("ddp", "full", 4, 4), ("ddp", "checkpoint", 1, 1),
    ("zero1", "none", 4, 1), ("zero1", "full", 1, 2), ("zero1", "checkpoint", 4, 4),
    ("zero2", "none", 1, 4), ("zero2", "full", 4, 1), ("zero2", "checkpoint", 4, 2),
    ("zero3", "none", 4, 2), ("zero3", "full", 1, 1), ("zero3", "checkpoint", 1, 4),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "memory", "micro_batches", "ranks"), ALL_PAIRS)
def test_every_pair_of_settings_under_inductor(preset, memory, micro_batches, ranks):
    start = time.perf_counter()
    check_cells([(preset, memory, micro_batches)], ranks, "inductor")
    if table := os.environ.get("STEPGRAPH_MATRIX"):
        row = {"preset": preset, "memory": memory, "micro_batches": micro_batches, "ranks": ranks}
        row |= {"equal": True, "seconds": round(time.perf_counter() - start)}
        with Path(table).open("a") as file:
            file.write(json.dumps(row) + "\n")


def raise_on_the_second_rank():
    """Rank 1 fails in the middle of a run; rank 0 waits for it in a collective."""
    model = tiny_llama()
    engine = stepgraph.Engine(model, optimizer=adamw(model.parameters()), lowering="eager")
    rank = int(os.environ["RANK"])
    for step in range(5):
        if rank == 1 and step == 2:
            raise RuntimeError("the second rank ran out of luck")
        engine.step(rank_part(llama_batch(step), rank, 2))


def test_a_rank_that_raises_stops_the_others_and_shows_the_first_error_only():
    start = time.perf_counter()
    with pytest.raises(LaunchError, match="the second rank ran out of luck") as caught:
        launch(raise_on_the_second_rank, ranks=2)
    assert time.perf_counter() - start < 60
    assert "gloo" not in str(caught.value).lower()


def different_mesh():
    model = tiny_llama()
    stepgraph.Engine(model, mesh="dp=3", lowering="eager")


def test_a_mesh_that_does_not_multiply_to_the_ranks_is_an_error_on_real_ranks():
    with pytest.raises(stepgraph.StepgraphError, match="3 ranks, but 2 are running"):
        launch(different_mesh, ranks=2)


def test_the_reference_falls():
    losses, _ = reference()
    assert losses[-1] < losses[0] * 1.1  # random data: it must at least not blow up
