"""The step as one CUDA graph, on one GPU: into ``benchmarks/results/cuda_graph_checks.json``.

Not run yet on any machine: where there is no device, each test is skipped with that reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.lowering.graphs.captured import release_all
from tests.end_to_end.test_one_program import bring
from tests.graphs.test_pieces import most_frequent
from tests.graphs.training import batch, model

pytestmark = pytest.mark.gpu
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cuda_graph_checks.json"
STEPS = 50
WITHOUT = {"cuda_graph": "inductor", "cuda_graph_eager": "eager"}


@pytest.fixture(scope="module")
def record():
    rows = {}
    yield rows
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    RESULTS.write_text(json.dumps(about, indent=1) + "\n")


def train(lowering, name="gpt2", steps=STEPS, **options):
    """Losses of steps of a model with dropout, which is recomputed, under a schedule."""
    brought = bring(name)
    made = brought.model.cuda().train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    how = {"plan": "zero3", "memory": "full", "max_grad_norm": 0.5} | options
    engine = stepgraph.Engine(
        made, loss=brought.loss, optimizer=optimizer, lowering=lowering, **how
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    losses = []
    for step in range(steps):
        losses.append(engine.step(brought.batch))
        schedule.step()
        if step % 10 == 9:
            losses.append(engine.evaluate(brought.batch))
    engine.close()
    return [float(loss) for loss in torch.stack(losses)]


@pytest.mark.parametrize("captures", WITHOUT)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"compute_dtype": torch.bfloat16}])
def test_losses_are_bitwise_those_without_the_graph(captures, options, record):
    expected, found = train(WITHOUT[captures], **options), train(captures, **options)
    record[f"gpt2, {captures}, {options}"] = {"losses": found, "without": expected}
    assert found == expected


def test_one_rank_over_nccl(record):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    try:
        expected = train("eager", "llama")
        found = train("cuda_graph_eager", "llama")
    finally:
        release_all()
        dist.destroy_process_group()
    record["llama, zero3, one rank over NCCL"] = {"losses": found, "without": expected}
    assert found == expected


def test_what_cannot_be_captured_runs_between(record):
    losses = {}
    for lowering in ("eager", "cuda_graph_eager"):
        made = model(most_frequent).cuda()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        engine = stepgraph.Engine(made, optimizer=optimizer, plan="ddp", lowering=lowering)
        losses[lowering] = [engine.step(batch(step)).item() for step in range(10)]
        engine.close()
    record["in pieces"] = losses
    assert losses["eager"] == losses["cuda_graph_eager"]


def test_the_split_use(record):
    losses = {}
    for lowering in ("eager", "cuda_graph_eager"):
        made = model().cuda()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        engine = stepgraph.Engine(made, optimizer=optimizer, plan="ddp", lowering=lowering)
        losses[lowering] = []
        for step in range(10):
            loss = engine(batch(step))
            engine.backward(loss)
            engine.optimizer_step()
            losses[lowering].append(loss.item())
        engine.close()
    record["split use"] = losses
    assert losses["eager"] == losses["cuda_graph_eager"]
