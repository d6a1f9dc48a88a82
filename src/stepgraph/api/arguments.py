"""Checks of what a script gives to Engine, before anything is changed."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import torch_internals
from stepgraph.cost.devices import device_at_hand
from stepgraph.errors import BatchError, PlanError, UsageError
from stepgraph.lowering.lower import check_lowering
from stepgraph.memory.presets import parse_policy
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning.fingerprint import fingerprint_of
from stepgraph.planning.plan import AUTO, Plan
from stepgraph.planning.settings import Settings
from stepgraph.program.layout import MeshShape

_COMPUTE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def check_arguments(model, optimizer, micro_batches, schedule, compute_dtype, reduce_dtype) -> None:
    """Values that no step can be made of."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel) or torch_internals.is_fsdp(model):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__} already",
            do="give Engine the plain module",
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise BatchError(f"micro_batches must be a positive whole number, got {micro_batches!r}")
    if schedule not in (None, "none"):
        raise UsageError(f"unknown schedule {schedule!r}", do="known: none")
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
        ("memory", memory, (str,)),
        ("lowering", lowering, (str,)),
    )
    for name, value, allowed in kinds:
        if value is not None and not isinstance(value, allowed):
            wanted = " or ".join(kind.__name__ for kind in allowed)
            raise UsageError(f"{name} must be a {wanted}, got {value!r}")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss must be callable as loss(model, batch), got {loss!r}")
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, (int, float))
        and math.isfinite(max_grad_norm)
        and max_grad_norm > 0
    ):
        raise UsageError(f"max_grad_norm must be a positive number, got {max_grad_norm!r}")
    if memory is not None:
        parse_policy(memory)
    if lowering is not None:
        check_lowering(lowering)


def make_plan(
    plan, mesh: MeshShape, memory: str | None, lowering: str | None, model: nn.Module
) -> Plan:
    """The plan in force: explicit arguments win over its own values.

    Raises:
        UsageError, MeshError: it is for another mesh.
        PlanError: no plan file, a malformed one, or one that was made for another model.
    """
    if isinstance(plan, Plan):
        made = copy.deepcopy(plan)  # the caller may give it to another engine, too
    elif isinstance(plan, Path) or str(plan).endswith(".json"):
        made = Plan.load(plan)
    else:
        made = Plan(str(plan), mesh)
    if made.placement == AUTO and made.settings is None:
        made.settings = Settings(device_at_hand(device_of(model).type).name)
    check_preset(made.placement, mesh)
    if made.mesh != mesh:
        raise UsageError(
            f"the plan is for mesh {made.mesh}, the ranks form {mesh}",
            do="launch that mesh, or make a plan for this one",
        )
    made.check_model(model)
    made.fingerprint = made.fingerprint or fingerprint_of(model)
    if memory is not None and memory != made.memory:
        made.memory, made.recomputation, made.predicted = memory, {}, None
    made.lowering = lowering or made.lowering
    return made


def compute_dtype_in(plan: Plan, given: torch.dtype | None) -> torch.dtype | None:
    """What a step computes in: the argument, else what the plan was made for.

    Raises:
        PlanError: the plan names no type that a step could compute in.
    """
    name = None if plan.settings is None else plan.settings.compute_dtype
    if given is not None or name is None:
        return given
    if name not in _COMPUTE_DTYPES:
        raise PlanError(
            f"the plan was made for computing in {name!r}, which is no floating-point type",
            do=f"known: {', '.join(_COMPUTE_DTYPES)}",
        )
    return _COMPUTE_DTYPES[name]


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model; the machine's accelerator for a model on the meta device."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    real = [device for device in devices if device.type != "meta"]
    if len(real) > 1:
        raise UsageError(
            f"the model is on several devices: {', '.join(sorted(map(str, real)))}",
            do="move it to one device",
        )
    if real:
        return real[0]
    return torch.accelerator.current_accelerator() or torch.get_default_device()
