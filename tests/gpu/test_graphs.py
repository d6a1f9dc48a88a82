"""The step as one CUDA graph, on one GPU: into ``benchmarks/results/cuda_graph_checks.json``."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.lowering.graphs.captured import release_all
from stepgraph.lowering.graphs.device import CudaGraphs
from tests.end_to_end.test_one_program import bring
from tests.graphs.test_pieces import most_frequent
from tests.graphs.training import batch, model

pytestmark = pytest.mark.gpu
RESULTS = "cuda_graph_checks.json"
STEPS = 50
WITHOUT = {"cuda_graph": "inductor", "cuda_graph_eager": "eager"}


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


OPTIONS = [
    {},
    {"micro_batches": 2},
    {"compute_dtype": torch.bfloat16},
    {"memory": {"transformer.h.*": "offload"}},
    {"memory": {"optimizer": "offload"}},
]


@pytest.mark.parametrize("captures", WITHOUT)
@pytest.mark.parametrize("options", OPTIONS)
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


def test_a_capture_that_fails_leaves_a_device_that_draws():
    graphs = CudaGraphs(torch.device("cuda", 0))
    x = torch.ones(3, device="cuda")
    with pytest.raises(Exception, match="captur"):
        graphs.capture(lambda: x.sum().item() + torch.rand(3, device="cuda"), [])
    assert torch.rand(3, device="cuda").shape == (3,)
    _, found = graphs.capture(lambda: x + 1, [])
    assert found.shape == (3,)
