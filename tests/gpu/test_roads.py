"""The other roads on one GPU: graph by graph, one's own loop, checkpoints, the check itself, the shell."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.torch_internals.limits import CRASHES_ON_DEVICES
from tests.end_to_end.models import without_dropout
from tests.end_to_end.test_one_program import bring
from tests.gpu.test_one_gpu import TOLERANCE, brought, eagerly

pytestmark = pytest.mark.gpu
RESULTS = "one_gpu_roads.json"
STEPS = 3


class Breaking(nn.Module):
    """A graph break in front of the model and one behind each of two layers."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())

    def forward(self, **batch):
        torch._dynamo.graph_break()
        return self.model(**batch)


def state_of(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_graph_by_graph(compiled_autograd, lowering, record):
    losses, parameters = eagerly("llama")
    model, batch, _, optimizer = brought("llama")
    broken = Breaking(model)
    engine = stepgraph.Engine(
        broken, loss=lambda m, b: m(**b).loss, optimizer=optimizer, plan="zero3", lowering=lowering
    )
    engine.compile(lowering, compiled_autograd=compiled_autograd)
    if compiled_autograd and CRASHES_ON_DEVICES:
        with pytest.raises(
            stepgraph.errors.UsageError, match="compiled autograd does not work here"
        ):
            engine.step(batch)
        return
    found = [engine.step(batch).item() for _ in range(STEPS)]
    record[f"llama, graph by graph, {lowering}, {compiled_autograd=}"] = {
        "losses": found, "eager": losses,
    }  # fmt: skip
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), **TOLERANCE)
    torch.testing.assert_close(state_of(model), parameters, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gpt2", "soft caps, flex", "unet"])
def test_the_backend_of_torch_compile(name, record):
    losses, parameters = eagerly(name)
    model, batch, loss, optimizer = brought(name)
    compiled = torch.compile(model, backend="stepgraph")
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(compiled, batch) if loss else compiled(**batch).loss
        value.backward()
        optimizer.step()
        found.append(value.item())
    record[f"{name}, backend"] = {"losses": found, "eager": losses}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), **TOLERANCE)
    torch.testing.assert_close(state_of(model), parameters, **TOLERANCE)


@pytest.mark.parametrize("backend", [None, "stepgraph", "inductor"])
def test_parallelize(backend, record):
    losses, parameters = eagerly("llama")
    model, batch, _, _ = brought("llama")
    model = stepgraph.parallelize(
        model, mesh="dp=1", plan="zero3", example=batch, loss=lambda m, b: m(**b).loss
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    run = torch.compile(model, backend=backend) if backend else model
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = run(batch)
        value.backward()
        optimizer.step()
        found.append(value.item())
    record[f"llama, parallelize, {backend}"] = {"losses": found, "eager": losses}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), **TOLERANCE)


@pytest.mark.parametrize("lowering", ["eager", "cuda_graph"])
def test_a_run_that_is_saved_and_loaded_goes_on_with_the_same_bits(lowering, tmp_path, record):
    def engine():
        found = bring("gpt2")
        model = found.model.cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        how = {"plan": "zero3", "memory": "full", "lowering": lowering, "max_grad_norm": 0.5}
        return stepgraph.Engine(model, loss=found.loss, optimizer=optimizer, **how), found.batch

    first, batch = engine()
    for _ in range(3):
        first.step(batch)
    first.save(tmp_path / "run")
    expected = [first.step(batch).item() for _ in range(3)]
    second, _ = engine()
    second.step(batch)
    second.load(tmp_path / "run")
    found = [second.step(batch).item() for _ in range(3)]
    record[f"gpt2, saved and loaded, {lowering}"] = {"losses": found, "expected": expected}
    first.close()
    second.close()
    assert found == expected


def test_the_check_of_every_pass():
    model, batch, loss, optimizer = brought("gpt2")
    engine = stepgraph.Engine(model, loss=loss, optimizer=optimizer, plan="zero3", memory="full")
    engine.step(batch)
    report = stepgraph.check(engine, batch)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "whisper", "mixtral", "vit", "LSTM"])
def test_half_precision_is_near_full(name, dtype, record):
    expected, _ = eagerly(name)
    model, batch, loss, optimizer = brought(name)
    engine = stepgraph.Engine(
        model, loss=loss, optimizer=optimizer, plan="ddp", lowering="inductor", compute_dtype=dtype
    )
    found = [engine.step(batch).item() for _ in range(STEPS)]
    record[f"{name}, {dtype}"] = {"losses": found, "full": expected}
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=5e-2, atol=2e-2)


def test_an_evaluation_between_steps_draws_nothing(record):
    found = bring("gpt2")
    model = found.model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = stepgraph.Engine(model, loss=found.loss, optimizer=optimizer, lowering="inductor")
    engine.step(found.batch)
    ours = engine.evaluate(found.batch).item()
    plain = without_dropout(bring("gpt2").model).cuda().eval()
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in engine.state_dict().items()}
    plain.load_state_dict(whole)
    on_device = {k: v.cuda() for k, v in found.batch.items()}
    with torch.no_grad():
        expected = plain(**on_device).loss.item()
    record["gpt2, evaluate"] = {"ours": ours, "eager": expected}
    assert abs(ours - expected) < 1e-4


def test_a_batch_of_pinned_memory_is_not_waited_for(record):
    """No synchronisation inside a step but the loss that is asked for."""
    model, batch, loss, optimizer = brought("llama")
    pinned = {k: v.cpu().pin_memory() for k, v in batch.items()}
    engine = stepgraph.Engine(
        model, loss=loss, optimizer=optimizer, plan="ddp", lowering="inductor"
    )
    for _ in range(3):
        engine.step(pinned)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with contextlib.ExitStack() as stack:
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        losses = [engine.step(pinned) for _ in range(3)]
    record["llama, no synchronisation"] = {"losses": torch.stack(losses).tolist()}


def test_the_shell(tmp_path, record):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    command = [
        sys.executable, "-m", "stepgraph", "train", "--model", "llama-tiny", "--text", str(tmp_path),
        "--ranks", "1", "--plan", "zero3", "--steps", "20", "--metrics", str(tmp_path / "m.jsonl"),
        "--lowering", "cuda_graph",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    record["stepgraph train"] = {"first": rows[0], "last": rows[-1]}
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_what_is_on_another_device_is_named():
    model, batch, loss, optimizer = brought("llama")
    model.lm_head.cpu()
    with pytest.raises(stepgraph.errors.StepgraphError, match="lm_head"):
        stepgraph.Engine(model, loss=loss, optimizer=optimizer).step(batch)


def test_a_kernel_of_triton_behind_a_registered_operator(record):
    pytest.importorskip("triton")
    from tests.api.test_own_triton import Gated, X, swish

    losses = {}
    for name, function in (("triton", swish), ("torch", nn.functional.silu)):
        for lowering in ("eager", "inductor"):
            model = Gated(function).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine = stepgraph.Engine(model, optimizer=optimizer, plan="zero3", lowering=lowering)
            losses[f"{name}, {lowering}"] = [engine.step(X).item() for _ in range(STEPS)]
    record["own operator"] = losses
    expected = torch.tensor(losses["torch, eager"])
    for found in losses.values():
        torch.testing.assert_close(torch.tensor(found), expected)
