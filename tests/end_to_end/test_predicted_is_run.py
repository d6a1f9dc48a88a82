"""What is predicted is what runs: collectives in kind, number and bytes, memory, and the very programs."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch

import stepgraph
from stepgraph.capture.module import default_loss
from stepgraph.cli.launcher import launch
from stepgraph.pipeline import foresee
from stepgraph.program.collectives import KINDS
from stepgraph.torch_internals import TorchDispatchMode, pytree
from tests.end_to_end.models import ROWS, bring
from tests.live_memory import live_step

# On one worker: what takes time is made once.
pytestmark = pytest.mark.xdist_group(__name__)
MODELS = ("llama", "gpt2", "vit", "mixtral", "convolutional")
MESHES = {
    2: {"ddp": "dp=2", "zero1": "dp=2", "zero2": "dp=2", "zero3": "dp=2", "auto": "dp=2"},
    4: {"hsdp": "replicate=2,shard=2", "tp+zero3": "dp=2,tp=2", "tp+sp+zero3": "dp=2,tp=2"},
}
ALL = {ranks: [(m, p) for m in MODELS for p in presets] for ranks, presets in MESHES.items()}
# One; the others are slow.
QUICK = {2: [("llama", "zero3")]}


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


def planned_once(*args: Any, **settings: Any) -> stepgraph.Plan:
    """The plan that the first rank makes, on every rank."""
    first = int(os.environ["RANK"]) == 0
    made = [stepgraph.plan(*args, **settings) if first else None]
    torch.distributed.broadcast_object_list(made)
    return made[0]


def run(ranks: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """By model and preset: what was predicted, what ran, and whether programs and memory agree."""
    found: dict[tuple[str, str], Any] = {}
    for name, preset in cases:
        mesh = MESHES[ranks][preset]
        brought = bring(name)
        loss = brought.loss or default_loss
        planned = planned_once(
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
        rank = torch.distributed.get_rank()
        shape = engine.plan.mesh
        each = ROWS // shape.data_size
        start = shape.data_rank(rank) * each
        batch = {k: v[start : start + each].clone() for k, v in brought.batch.items()}
        engine.step(batch)
        with Collectives() as seen:
            engine.step(batch)
        live = live_step(engine, batch)
        same = True
        if rank in (0, ranks - 1):  # a capture each
            example = brought.batch
            programs = planned.programs(bring(name).model, example=example, loss=loss, rank=rank)
            same = str(programs["step"]) == str(engine.programs["step"])
        # The plan's own number is of its lowering, where updates are in place; this is of what runs here.
        costs, lowering = planned.request.costs(), planned.request.lowering
        peak = foresee(engine.programs, costs, "eager").peak_bytes
        if rank == 0:
            same &= (
                planned.predicted.peak_bytes == foresee(engine.programs, costs, lowering).peak_bytes
            )
        found[name, preset] = {
            "predicted": predicted_of(planned),
            "ran": {kind: (n, seen.bytes[kind]) for kind, n in seen.calls.items()},
            "peak": (peak, live.peak),
            "same program": same,
        }
    return found


@pytest.fixture(scope="module")
def quick():
    return {ranks: launch(run, ranks, cases, ranks=ranks) for ranks, cases in QUICK.items()}


@pytest.fixture(scope="module")
def every():
    return {ranks: launch(run, ranks, cases, ranks=ranks) for ranks, cases in ALL.items()}


def check(found: list[dict[tuple[str, str], Any]], *case: str) -> None:
    for rank in found:
        row = rank[case]
        assert row["ran"] == row["predicted"], row
        assert row["same program"]
        predicted, measured = row["peak"]
        assert predicted == pytest.approx(measured, rel=0.05)


def flat(cases: dict[int, list[tuple[str, str]]]) -> list[tuple[int, str, str]]:
    return [(ranks, *case) for ranks, some in cases.items() for case in some]


@pytest.mark.parametrize(("ranks", "model", "preset"), flat(QUICK))
def test_on_real_ranks(quick, ranks, model, preset):
    check(quick[ranks], model, preset)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "model", "preset"), flat(ALL))
def test_every_model_under_every_preset(every, ranks, model, preset):
    check(every[ranks], model, preset)
