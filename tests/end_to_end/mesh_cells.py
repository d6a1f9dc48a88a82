"""Presets x ranks x memory x types x micro-batches: the cells of the second issue, and how one runs."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import stepgraph
from stepgraph.capture.step import Captured
from stepgraph.planning.request import AS_IT_IS, Precision
from stepgraph.program.layout import MeshShape
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.training import (
    CLIP,
    ROWS,
    STEPS,
    adamw,
    compare,
    llama_batch,
    tiny_llama,
)
from tests.one_process import OneProcessRun

VOCABULARY = 104  # divides over 2 and 4 ranks
BF16_RATE = 0.5
# Two-byte results round once per operation, 8 eps (see equivalence.check.tolerance). An SGD step is
# the rate times a gradient that is off by 8 eps of its largest entry; so is the way that a tensor has
# come in all of them. (Adam would turn the sign of an entry that is rounding noise into a full step.)
BF16_TOLERANCE = 8 * torch.finfo(torch.bfloat16).eps

# Meshes of 2, 4 and 8 ranks by preset; sequence parallelism where there is tensor parallelism.
WITH_TP = ("tp=2", "dp=2,tp=2", "dp=4,tp=2")
MESHES = {
    "tp": WITH_TP,
    **{f"tp+{data}": ("dp=1,tp=2", *WITH_TP[1:]) for data in ("ddp", "zero1", "zero2", "zero3")},
    "tp+hsdp": ("replicate=1,shard=1,tp=2", "replicate=1,shard=2,tp=2", "replicate=2,shard=2,tp=2"),
}
MESHES |= {plan.replace("tp", "tp+sp"): meshes for plan, meshes in MESHES.items()}
MESHES["hsdp"] = ("replicate=1,shard=2", "replicate=2,shard=2", "replicate=4,shard=2")


@dataclass(frozen=True)
class Cell:
    """One setting of everything."""

    plan: str
    mesh: str
    memory: str = "none"
    dtype: str = "fp32"
    micro_batches: int = 1
    layers: int = 2
    vocabulary: int = VOCABULARY

    @property
    def shape(self) -> MeshShape:
        return parse_mesh(self.mesh)

    @property
    def rows(self) -> int:
        return max(ROWS, self.shape.data_size * self.micro_batches)

    @property
    def precision(self) -> Precision:
        return Precision(torch.bfloat16) if self.dtype == "bf16" else AS_IT_IS

    def __str__(self) -> str:
        return f"{self.plan}-{self.mesh}-{self.memory}-{self.dtype}-{self.micro_batches}"

    def model(self) -> torch.nn.Module:
        return tiny_llama(self.layers, vocabulary=self.vocabulary)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        if self.dtype == "bf16":
            return torch.optim.SGD(model.parameters(), lr=BF16_RATE)
        return adamw(model.parameters())

    def settings(self, model) -> dict:
        """What an Engine and a run in one process are both told."""
        return {
            "optimizer": self.optimizer(model),
            "mesh": self.mesh,
            "plan": self.plan,
            "memory": self.memory,
            "micro_batches": self.micro_batches,
            "max_grad_norm": CLIP,
        }

    def compare(self, losses: list[float], parameters: dict[str, torch.Tensor]) -> None:
        """Asserts that a run equals plain PyTorch in one process."""
        if self.dtype == "fp32":
            compare(losses, parameters, self.vocabulary, self.rows, self.layers)
            return
        start = dict(self.model().named_parameters())
        expected = bf16_reference(self.layers, self.rows, self.vocabulary)
        compare_in_bf16((losses, parameters), expected, start)


Run = tuple[list[float], Mapping[str, torch.Tensor]]  # losses, final parameters


def compare_in_bf16(found: Run, expected: Run, start: Mapping[str, torch.Tensor]) -> None:
    """Asserts that two runs that compute in bf16 are equal; they began with ``start``."""
    for step, (loss, wanted) in enumerate(zip(found[0], expected[0], strict=True)):
        assert abs(loss - wanted) <= BF16_TOLERANCE * abs(wanted), (step, loss, wanted)
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        way = (expected[1][name] - start[name]).abs().max().item()
        difference = (value - expected[1][name]).abs().max().item()
        assert difference <= BF16_TOLERANCE * way, (name, difference, way)


@functools.cache
def bf16_reference(layers: int, rows: int, vocabulary: int) -> Run:
    """A bf16 copy computes, its gradients are clipped and update the fp32 masters."""
    masters = tiny_llama(layers, vocabulary=vocabulary)
    optimizer = torch.optim.SGD(masters.parameters(), lr=BF16_RATE)
    losses = []
    for step in range(STEPS):
        worker = copy.deepcopy(masters).bfloat16()
        loss = worker(**llama_batch(step, rows)).loss
        loss.backward()
        for master, parameter in zip(masters.parameters(), worker.parameters(), strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in masters.named_parameters()}


# Each bit of (memory, type, micro-batches) with each other one; three of them have both of each.
BITS = [("none", "fp32", 1), ("full", "bf16", 1), ("full", "fp32", 4), ("none", "bf16", 4)]
# Every pair of settings.
PAIRS = [
    Cell(plan, mesh, *BITS[(row + column) % len(BITS)])
    for row, (plan, meshes) in enumerate(MESHES.items())
    for column, mesh in enumerate(meshes)
]
ALL = [
    Cell(plan, mesh, memory, dtype, micro_batches)
    for plan, meshes in MESHES.items()
    for mesh in meshes
    for memory in ("none", "full")
    for dtype in ("fp32", "bf16")
    for micro_batches in (1, 4)
]


_captured: dict[tuple, Captured] = {}


def run_in_one_process(cell: Cell) -> OneProcessRun:
    """Ten steps on all ranks of a mesh that is not there; they equal plain PyTorch.

    Cells that differ in plan, mesh and memory alone share what was captured.
    """
    model = cell.model()
    key = (cell.dtype, cell.micro_batches, cell.layers, cell.vocabulary, cell.rows)
    run = OneProcessRun(
        model, **cell.settings(model), precision=cell.precision, captured=_captured.get(key)
    )
    losses = [run.step(llama_batch(step, cell.rows)).item() for step in range(STEPS)]
    _captured[key] = run.captured
    cell.compare(losses, run.parameters())
    return run


def train(cell: Cell, lowering: str) -> Run:
    """Ten steps on one real rank: losses and whole parameters."""
    shape, rank = cell.shape, int(os.environ["RANK"])
    model = cell.model()
    engine = stepgraph.Engine(
        model,
        **cell.settings(model),
        lowering=lowering,
        compute_dtype=cell.precision.compute,
    )
    losses = []
    for step in range(STEPS):
        whole = llama_batch(step, cell.rows)
        part = {k: v.chunk(shape.data_size)[shape.data_rank(rank)] for k, v in whole.items()}
        losses.append(engine.step(part).item())
    return losses, {n: p.detach().full_tensor() for n, p in engine.model.named_parameters()}
