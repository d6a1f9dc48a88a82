"""A model that breaks graphs twice and has a hook on a parameter, on ranks and in plain torch."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph

RANKS, STEPS, COMPARED, ROWS = 2, 20, 3, 8
PLANS = ("ddp", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16 model", "autocast")


@dataclass(frozen=True)
class Cell:
    """One combination of settings."""

    plan: str = "zero3"
    lowering: str = "eager"
    compiled_autograd: bool = False
    checkpointing: bool = False
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """As it stands in the table."""
        parts = (self.plan, self.lowering, "whole backward" if self.compiled_autograd else "")
        return ", ".join(
            filter(None, (*parts, "checkpoint" if self.checkpointing else "", self.precision))
        )


def all_cells(lowering: str, precisions: tuple[str, ...] = PRECISIONS) -> list[Cell]:
    """The matrix, under one lowering."""
    return [
        Cell(plan, lowering, whole, kept, precision)
        for plan, whole, kept, precision in itertools.product(
            PLANS, (False, True), (False, True), precisions
        )
    ]


class Broken(nn.Module):
    """Embedding, two blocks with a graph break behind each, a tied head: no size divides by two."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first, self.second = self._block(), self._block()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self._run(self.first, self.embed(tokens))
        torch._dynamo.graph_break()
        hidden = hidden + self._run(self.second, hidden)
        torch._dynamo.graph_break()
        return self.head(self.norm(hidden))

    def _run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return checkpoint(block, hidden, use_reentrant=False)
        return block(hidden)


def make_model(cell: Cell) -> Broken:
    """The same weights every time; the hook doubles one gradient."""
    torch.manual_seed(0)
    model = Broken(cell.checkpointing)
    if cell.precision == "bf16 model":
        model = model.to(torch.bfloat16)
    model.second[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def optimizer_of(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; where gradients are bfloat16's, SGD.

    Adam's first steps are of one size whatever the gradient's: one that is rounding noise around zero moves
    its parameter as far as any, one way or the other, and the gradients after it are another function's.
    """
    if cell.precision == "fp32":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(cell: Cell, ignored: int = 0):
    """A loss over tokens that are not ignored: ranks have different numbers of them."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "autocast"):
            scores = model(batch[0])
        return nn.functional.cross_entropy(
            scores.flatten(0, 1).float(), batch[1].flatten(), ignore_index=ignored
        )

    return loss


def batch_of(step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's rows of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 13, (ROWS, 5), generator=generator)
    labels = torch.randint(0, 4, (ROWS, 5), generator=generator)
    return tokens.chunk(ranks)[rank], labels.chunk(ranks)[rank]


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients, copied."""
    return {
        name: getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)().clone()
        for name, p in model.named_parameters()
    }


def plain(cell: Cell, ignored: int = 0) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of the first steps, in one process, by plain torch."""
    model, loss = make_model(cell), loss_of(cell, ignored)
    optimizer, found = optimizer_of(cell, model), []
    for step in range(COMPARED):
        value = loss(model, batch_of(step))
        value.backward()
        found.append((value.item(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained(cell: Cell) -> dict[str, Any]:
    """One rank's run: what :func:`plain` returns, and how often it compiled."""
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = make_model(cell)
    engine = stepgraph.Engine(
        model,
        loss=loss_of(cell),
        optimizer=optimizer_of(cell, model),
        plan=cell.plan,
        lowering=cell.lowering,
    )
    engine.compile(cell.lowering, compiled_autograd=cell.compiled_autograd)
    found: list = []
    with stepgraph.no_recompiles(after=2):
        for step in range(STEPS):
            value = engine(batch_of(step, rank, ranks))
            value.backward()
            if step < COMPARED:
                found.append((value.item(), gradients_of(engine.model)))
            engine.optimizer_step()
            if step == 1:
                warm = engine.stats.compiles
    return {
        "steps": found,
        "graphs": len(engine._graphs.graphs.programs),
        "compiles": engine.stats.compiles,
        "after warm-up": engine.stats.compiles - warm,
        "recompiles": list(engine.stats.recompiles),
    }


# Gradients are sums of products: fp32 sums of a few hundred terms differ by their order alone, a few
# units in the last place of the largest term; a bfloat16 value has 8 bits, and a gradient here has been
# rounded at every operation on its way (about ten), other sums on each rank than in one process.
TOLERANCE = {"fp32": 1e-5, "bf16 model": 10 * 2.0**-8, "autocast": 10 * 2.0**-8}


def difference(cell: Cell, found: dict[str, Any], expected: list) -> float:
    """The largest difference of a gradient from plain torch's, in units of its largest element."""
    worst = 0.0
    for (value, gradients), (wanted, whole) in zip(found["steps"], expected, strict=True):
        worst = max(worst, abs(value - wanted) / abs(wanted))
        for name, gradient in whole.items():
            scale = gradient.abs().max().float()
            worst = max(worst, float((gradients[name] - gradient).abs().max() / scale))
    return worst
