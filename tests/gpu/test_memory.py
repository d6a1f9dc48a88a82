"""What is kept for the backward, on one GPU: the same losses, the predicted peaks, memory of the host."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

import stepgraph
from stepgraph.program.copies import TO_HOST
from tests.gpu.predictions import peak_one_by_one

pytestmark = pytest.mark.gpu
RESULTS, BITWISE = "one_gpu_memory.json", True
WORDS, ROWS, TOKENS, STEPS = 4096, 8, 512, 4
POLICIES = {
    "none": "none",
    "full": "full",
    "ops": "ops",
    "layers:2": "layers:2",
    "offload": {"model.layers.*": "offload"},
    "states offloaded": {"optimizer": "offload"},
    "half offloaded": {"model.layers.0": "offload", "model.layers.1": "offload"},
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=WORDS, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).cuda().train()


def batch():
    ids = torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.cuda(), "labels": ids.cuda()}


def at_rest():
    """Bytes that are there without any step: what else lives, and cuBLAS's own memory."""
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@functools.cache
def trained(memory, lowering="eager"):
    """Losses, the peak of a later step, and the engine's copies to the host."""
    before = at_rest()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = stepgraph.Engine(
        model, optimizer=optimizer, plan="ddp", memory=POLICIES[memory], lowering=lowering
    )
    losses = [engine.step(batch()) for _ in range(STEPS - 1)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    losses.append(engine.step(batch()))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    copies = sum(n.target is TO_HOST for p in engine.programs.values() for n in p.operations())
    engine.close()
    return torch.stack(losses).tolist(), peak, copies


@pytest.mark.parametrize("memory", POLICIES)
def test_losses_are_those_of_all_kept_and_the_peak_is_the_predicted_one(memory, record):
    plan = stepgraph.plan(
        llama(), example=batch(), mesh="dp=1", placement="ddp", memory=POLICIES[memory],
        compute_dtype=None,
    )  # fmt: skip
    found, peak, copies = trained(memory)
    expected, whole, _ = trained("none")
    predicted = peak_one_by_one(plan, llama(), batch())
    record[memory] = {
        "losses": found, "none": expected, "copies": copies, "peak": peak, "predicted": predicted,
        "peak of none": whole, "ratio": peak / predicted,
        "predicted compiled": plan.predicted.peak_bytes,
    }  # fmt: skip
    assert found == expected
    assert bool(copies) == ("offload" in memory)
    if memory != "none":
        assert peak < whole
    assert 0.95 < peak / predicted < 1.05


@pytest.mark.parametrize("lowering", ["inductor", "cuda_graph", "cuda_graph_eager"])
@pytest.mark.parametrize("memory", ["full", "offload", "states offloaded"])
def test_compiled_and_captured(memory, lowering, record):
    found, peak, _ = trained(memory, lowering)
    expected, whole, _ = trained("none", lowering)
    record[f"{memory}, {lowering}"] = {
        "losses": found, "none": expected, "peak": peak, "peak of none": whole,
    }  # fmt: skip
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    if lowering == "inductor":
        assert peak < whole


def test_logits_in_pieces(record):
    """A head of 64k words: its logits are never whole."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words, found = 65536, {}
    ids = torch.randint(0, words, (4, 1024), generator=torch.Generator().manual_seed(0)).cuda()
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=words,
    )  # fmt: skip
    for memory in ("none", "budget:1600MiB"):
        before = at_rest()
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = stepgraph.Engine(
            model, optimizer=optimizer, plan="ddp", memory=memory, lowering="inductor"
        )
        losses = [engine.step({"input_ids": ids, "labels": ids}) for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        losses.append(engine.step({"input_ids": ids, "labels": ids}))
        torch.cuda.synchronize()
        found[memory] = {
            "losses": torch.stack(losses).tolist(),
            "peak": torch.cuda.max_memory_allocated() - before,
        }
        engine.close()
        del model, optimizer, engine, losses
    record["logits of 65536 words"] = found
    whole, pieces = found.values()
    torch.testing.assert_close(
        torch.tensor(pieces["losses"]), torch.tensor(whole["losses"]), rtol=2e-4, atol=2e-4
    )
    assert pieces["peak"] <= 1600 * 2**20 < whole["peak"]
