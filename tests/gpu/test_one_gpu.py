"""The zoo's steps on one CUDA device against one eager process on the host; writes a JSON (not run yet)."""

import json
import time
from pathlib import Path

import pytest
import torch

import stepgraph
from tests.end_to_end.test_one_program import ZOO, bring

pytestmark = pytest.mark.gpu
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "one_gpu.json"
STEPS = 3
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}  # kernels of another device add up otherwise


def without_dropout(model):
    """The two sides would draw alike only where attention draws outside its kernel."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def trained(name, device, lowering):
    brought = bring(name)
    model = without_dropout(brought.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = stepgraph.Engine(
        model, loss=brought.loss, optimizer=optimizer, plan="ddp", lowering=lowering
    )
    losses = [engine.step(brought.batch).item() for _ in range(STEPS)]
    return losses, {n: p.detach().full_tensor().cpu() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def record():
    rows = {}
    yield rows
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "models": rows}
    RESULTS.write_text(json.dumps(about, indent=1) + "\n")


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", [name for name in ZOO if "noise" not in name])
def test_steps_are_those_of_the_host(name, lowering, record):
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses, parameters = trained(name, "cuda", lowering)
    expected, others = trained(name, "cpu", "eager")
    record[f"{name}, {lowering}"] = {
        "losses": losses,
        "host": expected,
        "seconds": time.perf_counter() - start,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **TOLERANCE)
    torch.testing.assert_close(parameters, others, **TOLERANCE)


def attending(memory, seed=0):
    brought = bring("gpt2")
    model = brought.model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = stepgraph.Engine(
        model, optimizer=optimizer, plan="ddp", memory=memory, lowering="eager", seed=seed
    )
    return [engine.step(brought.batch).item() for _ in range(STEPS)]


def test_dropout_in_attention_is_drawn_again_alike():
    kept = attending("none")
    assert kept == attending("none") and kept != attending("none", seed=1)
    torch.testing.assert_close(torch.tensor(kept), torch.tensor(attending("full")), **TOLERANCE)
