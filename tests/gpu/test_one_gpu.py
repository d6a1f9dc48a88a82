"""What one GPU can show, in one command (``make test-gpu``): it writes ``benchmarks/results/one_gpu.json``.

Where there is no device, each test is skipped with that reason.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import stepgraph
from stepgraph.capture.module import default_loss
from tests.end_to_end.models import without_dropout
from tests.end_to_end.test_one_program import ZOO, bring
from tests.gpu.predictions import peak_one_by_one

pytestmark = pytest.mark.gpu
RESULTS = "one_gpu.json"
DEVICE, STEPS = "cuda", 3
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}  # fused kernels add up in another order


def brought(name):
    """A model on the device, its batch, loss and optimizer; no dropout: plain PyTorch draws otherwise."""
    found = bring(name)
    model = without_dropout(found.model).to(DEVICE).train()
    batch = pytree.tree_map(lambda tensor: tensor.to(DEVICE), found.batch)
    # A gradient that is zero but for rounding, as a bias of keys has, moves nothing by its sign.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    return model, batch, found.loss, optimizer


def eagerly(name):
    """Losses and parameters of plain PyTorch, one process."""
    model, batch, loss, optimizer = brought(name)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = (loss or default_loss)(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {n: p.detach().cpu() for n, p in model.named_parameters()}


def compiled(name, lowering, plan="ddp"):
    """The same of an engine."""
    model, batch, loss, optimizer = brought(name)
    engine = stepgraph.Engine(model, loss=loss, optimizer=optimizer, plan=plan, lowering=lowering)
    losses = [engine.step(batch).item() for _ in range(STEPS)]
    return losses, {n: p.detach().full_tensor().cpu() for n, p in model.named_parameters()}


def compare(record, key, found, expected):
    difference = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    record.setdefault(key, {}).update(losses=found[0], eager=expected[0], difference=difference)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), **TOLERANCE)
    torch.testing.assert_close(found[1], expected[1], **TOLERANCE)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", [name for name in ZOO if "noise" not in name])
def test_steps_are_those_of_one_eager_process(name, lowering, record):
    expected = eagerly(name)
    start = time.perf_counter()
    found = compiled(name, lowering)
    record[f"{name}, {lowering}"] = {"seconds": time.perf_counter() - start}
    compare(record, f"{name}, {lowering}", found, expected)


def test_one_rank_over_nccl(record):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    device = torch.device(DEVICE, 0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    try:
        found = compiled("llama", "eager", plan="zero3")
        total = torch.ones((), device=device)
        dist.all_reduce(total)
        assert total.item() == 1
    finally:
        dist.destroy_process_group()
    compare(record, "llama, zero3, one rank over NCCL", found, eagerly("llama"))


def test_the_peak_is_the_predicted_one(record):
    """Of a Llama whose activations outweigh what kernels hold for themselves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=4096,
    )  # fmt: skip
    ids = torch.randint(0, 4096, (8, 512), device=DEVICE)
    batch = {"input_ids": ids, "labels": ids.clone()}
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
    plan = stepgraph.plan(
        model, example=batch, mesh="dp=1", placement="ddp", memory="none", compute_dtype=None
    )
    predicted = peak_one_by_one(plan, model, batch)
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.AdamW(model.parameters()), plan="ddp", lowering="eager"
    )
    engine.step(batch)
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    measured = torch.cuda.max_memory_allocated()
    record["peak of a Llama"] = {"measured": measured, "predicted": predicted}
    assert 0.85 < measured / predicted < 1.15


def attending(memory, seed=0):
    found = bring("gpt2")
    model = found.model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = stepgraph.Engine(
        model, optimizer=optimizer, plan="ddp", memory=memory, lowering="eager", seed=seed
    )
    return [engine.step(found.batch).item() for _ in range(STEPS)]


def test_dropout_in_attention_is_drawn_again_alike(record):
    kept = attending("none")
    recomputed = attending("full")
    record["gpt2 with dropout"] = {"kept": kept, "recomputed": recomputed}
    assert kept == attending("none")
    assert kept != attending("none", seed=1)
    torch.testing.assert_close(torch.tensor(kept), torch.tensor(recomputed), **TOLERANCE)
