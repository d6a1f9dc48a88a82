"""What is predicted is what runs: collectives in kind, number and bytes, memory, and the very programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.capture.module import default_loss
from stepgraph.cli.launcher import launch
from stepgraph.program.collectives import KINDS
from stepgraph.runtime.batches import flatten_batch
from stepgraph.torch_internals import TorchDispatchMode, pytree
from tests.end_to_end.models import ROWS, bring
from tests.live_memory import LiveMemory
from tests.support import CPU

MODELS = ("llama", "gpt2", "vit", "mixtral", "convolutional")
PRESETS = {
    2: {"ddp": "dp=2", "zero1": "dp=2", "zero2": "dp=2", "zero3": "dp=2", "auto": "dp=2"},
    4: {"hsdp": "replicate=2,shard=2", "tp+zero3": "dp=2,tp=2", "tp+sp+zero3": "dp=2,tp=2"},
}


class Collectives(TorchDispatchMode):
    """Counts what a rank really calls: (kind -> calls, bytes of the larger side)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in KINDS:
            tensors = [x for x in pytree.tree_leaves((args[0], result)) if hasattr(x, "numel")]
            self.calls[KINDS[func]] += 1
            self.bytes[KINDS[func]] += max(x.numel() * x.element_size() for x in tensors)
        return result


def predicted_of(plan: stepgraph.Plan) -> dict[str, tuple[int, int]]:
    found: dict[str, list[int]] = {}
    for (_, kind), row in plan.predicted.collectives.items():
        total = found.setdefault(kind, [0, 0])
        total[0] += row["count"]
        total[1] += row["bytes"]
    return {kind: tuple(total) for kind, total in found.items()}


def run(ranks: int, models: tuple[str, ...]) -> dict[str, Any]:
    """By model and preset: what was predicted, what ran, and whether programs and memory agree."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    found: dict[str, Any] = {}
    for name in models:
        for preset, mesh in PRESETS[ranks].items():
            brought = bring(name)
            loss = brought.loss or default_loss
            planned = stepgraph.plan(
                bring(name).model,
                example=brought.batch,
                loss=loss,
                mesh=mesh,
                placement=preset,
                memory="none",
                device="cpu",
                compute_dtype=None,
            )
            model = brought.model
            engine = stepgraph.Engine(
                model,
                loss=loss,
                optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
                mesh=mesh,
                plan=planned if preset == "auto" else preset,
                lowering="eager",
            )
            rank = engine._ranks.rank
            shape = engine.plan.mesh
            each = ROWS // shape.data_size
            start = shape.data_rank(rank) * each
            batch = {k: v[start : start + each].clone() for k, v in brought.batch.items()}
            engine.step(batch)
            with Collectives() as seen:
                engine.step(batch)
            leaves = flatten_batch(batch, CPU)
            step = engine._programs_of("step", leaves).programs["step"]
            held = [argument for argument in step.arguments if argument is not None]
            with LiveMemory([*held, *leaves.leaves]) as live:
                engine.step(batch)
            programs = planned.programs(
                bring(name).model, example=brought.batch, loss=loss, rank=rank
            )
            found[f"{name} {preset}"] = {
                "predicted": predicted_of(planned),
                "ran": {kind: (n, seen.bytes[kind]) for kind, n in seen.calls.items()},
                "peak": (planned.predicted.peak_bytes, live.peak),
                "same program": str(programs["step"]) == str(engine.programs["step"]),
            }
    return found


@pytest.fixture(scope="module")
def two():
    return launch(run, 2, MODELS, ranks=2)


@pytest.fixture(scope="module")
def four():
    return launch(run, 4, ("llama", "gpt2", "convolutional"), ranks=4)


def check(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        row = rank[case]
        assert row["ran"] == row["predicted"], row
        assert row["same program"]
        predicted, measured = row["peak"]
        assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("preset", PRESETS[2])
@pytest.mark.parametrize("name", MODELS)
def test_on_two_ranks(two, name, preset):
    check(two, f"{name} {preset}")


@pytest.mark.parametrize("preset", PRESETS[4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "convolutional"])
def test_on_four_ranks(four, name, preset):
    check(four, f"{name} {preset}")
