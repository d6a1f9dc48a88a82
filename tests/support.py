"""What the tests of several rooms share: small models, batches, captured programs, comparisons."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph.capture.module import capture, default_loss
from stepgraph.capture.step import Source
from stepgraph.equivalence.comparing import relative_difference, tolerance
from stepgraph.equivalence.values import AS_USUAL, GlobalValues
from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.pipeline import ALL_RANKS, Made, capture_of, make
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.planning.request import StepSettings
from stepgraph.planning.target import usual_target
from stepgraph.program.driver import PassDriver
from stepgraph.program.invariants import check_invariants
from stepgraph.program.layout import Placements
from stepgraph.program.program import Program
from stepgraph.program.record import Pass
from stepgraph.program.text import program_text
from stepgraph.runtime.batches import flatten_batch, global_spec
from stepgraph.runtime.ranks import parse_mesh
from tests.one_process import OneProcessRun

CPU = torch.device("cpu")
HOST = usual_target("cpu")
VOCABULARY = 37  # does not divide over 2, 3 or 4 ranks
RANKS = (1, 2, 3, 4)
ROWS = 12  # divides over 1, 2, 3 and 4 ranks, and into two micro-batches on 1, 2 and 3


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple]
) -> list[float]:
    """What plain PyTorch's steps come to; the model returns its loss."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Mlp(nn.Module):
    """Two layers whose sizes divide over no number of ranks, a 0-dim parameter (``scaled``), a buffer.

    ``reduction`` is how the squared error is normalised: ``mean``, ``sum`` or ``count`` (by a sum of
    weights that are part of the batch, as losses over unmasked tokens are).
    """

    def __init__(self, reduction: str = "mean", scaled: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5)) if scaled else 1.5
        self.register_buffer("shift", torch.full((3,), 0.25))
        self.reduction = reduction

    def forward(self, x, y, weight):
        error = (self.second(torch.tanh(self.first(x))) * self.scale + self.shift - y) ** 2
        if self.reduction == "mean":
            return error.mean()
        total = (error.sum(1) * weight).sum()
        return total if self.reduction == "sum" else total / weight.sum()


def mlp(reduction: str = "mean", *, scaled: bool = True, seed: int = 0) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(reduction, scaled)


def regression_batch(rows: int = ROWS, seed: int = 1) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    weight = (torch.rand(rows, generator=random) > 0.3).float()
    weight[0] = 1.0
    return (
        torch.randn(rows, 5, generator=random),
        torch.randn(rows, 3, generator=random),
        weight,
    )


def tiny_llama(layers: int = 2, seed: int = 0, **config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | config)))


class Tower(nn.Module):
    """Residual layers between two that are unlike them: what is cheap to capture and deep."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return ((self.last(x) - y) ** 2).mean()


def tower(layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Tower(layers), (torch.randn(8, 8), torch.randn(8, 8))


def token_batch(rows: int = ROWS, length: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    """Tokens with ignored labels (a different number in every row) and a padding mask."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=random)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row in range(rows):
        labels[row, : row % (length - 1)] = -100
    mask[1, -3:] = 0
    labels[1, -3:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def adamw(model: nn.Module, **numbers: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | numbers))


# ------------------------------------------------------------------------------------- programs


def spec_of(batch: Any):
    """The batch's structure and fake leaves."""
    return global_spec(flatten_batch(batch, CPU), 1, 1)


def captured(model: nn.Module, batch: Any, loss: Callable | None = None, **options) -> Program:
    """The joint Program (or, with ``training=False``, the forward) as capture leaves it."""
    return capture(model, loss or default_loss, spec_of(batch), **options)[0]


def compiled(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ranks: int = 1,
    plan: str = "zero3",
    memory: str = "none",
    micro_batches: int = 1,
    clip: bool = False,
    schedule: str = "none",
    driver: PassDriver | None = None,
) -> Made:
    """The placed programs of a training step, for all ranks; ``batch`` is one global micro-batch."""
    driver = driver or PassDriver(invariants=True)
    step = StepSettings(optimizer and "optimizer", micro_batches, clip)
    mesh = parse_mesh(f"dp={ranks}")
    made = preset_plan(plan, mesh, memory=memory, schedule=schedule, step=step)
    return programs_of(model, batch, made, optimizer, driver)


def programs_of(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None = None,
    driver: PassDriver | None = None,
) -> Made:
    """The programs of a training step under a plan, for all ranks."""
    driver = driver or PassDriver()
    source = Source(model, default_loss, spec_of(batch), optimizer)
    reduces = reduces_each_micro_batch(plan.placement, plan.mesh)
    step = capture_of(source, plan.request.step, driver).step(reduces)
    return make(step.programs, plan, HOST, ALL_RANKS, driver=driver)


def bound(program: Program) -> list[Program]:
    """Every rank's own Program; groups keep the names of their mesh dimensions."""
    assert program.mesh is not None
    return [bind_to_rank(program.copy(), rank) for rank in range(program.mesh.world_size)]


def stored_parameters(plan: Plan) -> dict[str, Placements]:
    """Where a plan stores each parameter."""
    stored = {label: p for label, p in plan.inputs().items() if label.startswith("Param(")}
    return {label[len("Param(") : -1]: placements for label, placements in stored.items()}


def notes_of(run: OneProcessRun) -> list[str]:
    """What a run has to tell, as an Engine reports it."""
    assert run.captured is not None
    told = [note for program in run.programs.values() for note in program.notes]
    return [*run.captured.notes, *dict.fromkeys(told)]


def observed_pass(
    name: str, program: str = "step", **options: Any
) -> tuple[Program, Program, dict[str, Any]]:
    """(before, after, arguments) of one pass in the pipeline; options as for :func:`compiled`."""
    seen: list[tuple[Program, Program, dict[str, Any]]] = []

    def observe(found: Pass, before: Program, after: Program, arguments: dict[str, Any]) -> None:
        if found.name == name and after.name == program:
            seen.append((before, after, arguments))

    compiled(**options, driver=PassDriver(invariants=True, observe=observe))
    return seen[0]


# -------------------------------------------------------------------------------------- results


def values(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    settings: StepSettings = AS_USUAL,
) -> GlobalValues:
    """Inputs for any Program of this step: the model's own values, made-up optimizer states."""
    source = Source(model, default_loss, spec_of(batch), optimizer)
    return GlobalValues(source, flatten_batch(batch, CPU), settings, max_grad_norm)


def eager(model: nn.Module, batch: Any, loss: Callable = default_loss) -> dict[str, torch.Tensor]:
    """Loss (under the name ``loss``) and gradients of plain PyTorch."""
    model.zero_grad(set_to_none=True)
    result = loss(model, batch)
    result.backward()
    found = {"loss": result.detach()}
    found |= {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def assert_bitwise(old: Mapping, new: Mapping) -> None:
    """All results that both have are the same bits; NaN is NaN."""
    assert old.keys() & new.keys()
    for role in old.keys() & new.keys():
        assert relative_difference(old[role], new[role]) == 0, role


def assert_summation(old: Mapping, new: Mapping) -> None:
    """All results that both have differ by no more than another order of summation."""
    assert old.keys() & new.keys()
    for role in old.keys() & new.keys():
        assert relative_difference(old[role], new[role]) <= tolerance(old.values()), role


# ---------------------------------------------------------------------------------- golden texts


def assert_golden(test_file: str, name: str, before: Program, after: Program) -> None:
    """Compares the text before and after a pass with ``golden/<name>.txt`` beside the test.

    ``STEPGRAPH_UPDATE_GOLDEN=1`` writes the file instead.
    """
    for program in (before, after):
        check_invariants(program)
    assert_golden_text(
        test_file, name, f"{program_text(before, 'before')}\n{program_text(after, f'after {name}')}"
    )


def assert_golden_text(test_file: str, name: str, text: str) -> None:
    """Compares a text with its golden file."""
    path = Path(test_file).parent / "golden" / f"{name}.txt"
    if os.environ.get("STEPGRAPH_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run once with STEPGRAPH_UPDATE_GOLDEN=1"
    assert text == path.read_text()
