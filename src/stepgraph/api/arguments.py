"""Checks of what a script gives to Engine, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stepgraph import torch_internals
from stepgraph.cost.devices import device_at_hand
from stepgraph.errors import BatchError, UsageError
from stepgraph.lowering.decide import check_target
from stepgraph.lowering.presets import check_lowering
from stepgraph.memory.patterns import as_text
from stepgraph.memory.presets import parse_policy
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning.file import load_plan
from stepgraph.planning.fingerprint import fingerprint_of
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.runtime.batches import first_on_each
from stepgraph.runtime.ranks import Ranks
from stepgraph.schedule.decide import check_schedule


def check_arguments(model, optimizer, micro_batches, schedule, compute_dtype, reduce_dtype) -> None:
    """Values that no step can be made of."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel) or torch_internals.is_fsdp(model):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__} already",
            do="give Engine the plain module",
        )
    if taken := next((n for n, p in model.named_parameters() if isinstance(p, DTensor)), None):
        raise UsageError(
            f"parameter {taken!r} is a DTensor already: an Engine, parallelize or torch has placed it",
            do="give it the plain module, or build it anew (on the meta device, to plan); what a step "
            "does now says engine.report()",
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise BatchError(f"micro_batches must be a positive whole number, got {micro_batches!r}")
    if schedule is not None:
        check_schedule(schedule)
    for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not floating:
            raise UsageError(
                f"{name} must be a floating-point torch.dtype, got {dtype!r}",
                do=f"for example {name}=torch.bfloat16",
            )


def check_kinds(loss, mesh, plan, memory, lowering, max_grad_norm) -> None:
    """Arguments of a wrong type, numbers that cannot be meant, unknown policies and lowerings."""
    kinds = (
        ("mesh", mesh, (str, DeviceMesh)),
        ("plan", plan, (str, Path, Plan)),
        ("memory", memory, (str, Mapping)),
        ("lowering", lowering, (str,)),
    )
    for name, value, allowed in kinds:
        if value is not None and not isinstance(value, allowed):
            wanted = " or ".join(kind.__name__ for kind in allowed)
            raise UsageError(f"{name} must be a {wanted}, got {value!r}")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss must be callable as loss(model, batch), got {loss!r}")
    norm = max_grad_norm
    if norm is not None and not (isinstance(norm, (int, float)) and 0 < norm < math.inf):
        raise UsageError(f"max_grad_norm must be a positive number, got {max_grad_norm!r}")
    if memory is not None:
        parse_policy(as_text(memory))
    if lowering is not None:
        check_lowering(lowering)


def check_compile(backend: str, whole: bool, enabled: bool | None, options: dict) -> bool:
    """Refuses what ``engine.compile`` cannot do; returns whether a backward is one graph.

    Raises:
        UsageError: names the argument.
    """
    check_lowering(backend)
    if options:
        raise UsageError(
            f"engine.compile takes no option {next(iter(options))!r}",
            why="shapes are fixed, and the plan decides what torch's modes decide",
            do="leave it out; known: backend, compiled_autograd, fullgraph",
        )
    if whole and enabled is False:
        raise UsageError(
            "compiled_autograd=True and compiled_autograd_enabled=False contradict each other",
            do="give one of them: they are two names of one setting",
        )
    return bool(whole or enabled)


def make_plan(plan, ranks: Ranks, model: nn.Module, **policies: Any) -> Plan:
    """The plan in force: policies (memory, schedule, lowering) that are not None win over its own.

    Raises:
        UsageError, MeshError: it is for another mesh.
        LoweringError: its lowering captures graphs, and these ranks' device has none.
        PlanError: no plan file, a malformed one, or one that was made for another model.
    """
    mesh = ranks.shape
    if isinstance(plan, Plan):
        made = plan
    elif isinstance(plan, Path) or str(plan).endswith(".json"):
        made = load_plan(Path(plan))
    else:
        made = preset_plan(str(plan), mesh)
        check_preset(made.placement, mesh)
    if made.mesh != mesh:
        raise UsageError(
            f"the plan is for mesh {made.mesh}, the ranks form {mesh}",
            do="launch that mesh, or make a plan for this one",
        )
    made.check_model(model)
    made = replace(made, fingerprint=made.fingerprint or fingerprint_of(model))
    given = {name: as_text(value) for name, value in policies.items() if value is not None}
    made = made.under(**given)
    check_target(made.lowering, ranks.target)
    if made.request.decided_by_cost and not made.request.device:
        made = made.under(device=device_at_hand(device_of(model).type).name)
    return made


def name_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    """What a plan calls an optimizer."""
    return None if optimizer is None else type(optimizer).__name__.lower()


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model; the machine's accelerator for a model on the meta device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    first = first_on_each(tensors, but=("meta",))
    if len(first) > 1:
        raise UsageError(
            f"the model is on several devices: {', '.join(first.values())}",
            do="move it to one device: model.to(...)",
        )
    if first:
        return next(iter(first))
    return torch.accelerator.current_accelerator(check_available=True) or torch.get_default_device()
