"""``stepgraph.check``: proves by execution that no pass changed the result."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.api.arguments import device_of
from stepgraph.api.engine import Engine
from stepgraph.api.plan import Plan
from stepgraph.equivalence.check import check_model
from stepgraph.equivalence.comparing import CheckReport
from stepgraph.equivalence.graph_by_graph import check_graphs
from stepgraph.errors import GraphBreakError, UsageError
from stepgraph.program.layout import MeshShape
from stepgraph.runtime.batches import flatten_batch
from stepgraph.runtime.progress import doing
from stepgraph.torch_internals import host_device, pytree


def check(engine_or_plan: Engine | Plan, batch: Any) -> CheckReport:
    """Runs every pass's program before and after it, all ranks in one process, on real tensors.

    It runs on the host, whatever the engine's device; of a lowering that captures, what is captured.
    The engine is not changed. With several ranks every rank must call it, with its own part of the
    batch; each checks the whole.

    Args:
        engine_or_plan: the engine whose step is checked.
        batch: this rank's part, as for ``engine.step``.

    Returns:
        a report; ``report.ok``, and ``report.first_difference``: the first pass that changed a result.

    Raises:
        UsageError: a Plan alone, which has no model to run.
    """
    if not isinstance(engine_or_plan, Engine):
        raise UsageError(
            "a plan alone has no model and no tensors to run",
            do="build an Engine with it: stepgraph.check(stepgraph.Engine(model, plan=plan), batch)",
        )
    engine = engine_or_plan
    with doing("checking every pass"):
        runner = engine.graph_by_graph()
        if runner is None:
            try:
                return _check_whole(engine, batch)
            except GraphBreakError:
                runner = engine.graph_by_graph(batch)
        assert runner is not None
        return check_graphs(runner, flatten_batch(batch, device_of(engine.model)))


def _check_whole(engine: Engine, batch: Any) -> CheckReport:
    settings, step = engine.settings(), engine.plan.request.step
    with engine.model_as_given():
        model, replaced = _plain_copy(engine.model)
    optimizer = settings.pop("optimizer")
    return check_model(
        model,
        optimizer=_optimizer_over(optimizer, replaced),
        batch=_global_batch(batch, engine.plan.mesh),
        mesh=engine.plan.mesh,
        plan=engine.plan,
        lowerings=list(dict.fromkeys(("eager", engine.plan.lowering))),
        micro_batches=step.micro_batches,
        precision=step.precision,
        **settings,
    )


def _plain_copy(model: nn.Module) -> tuple[nn.Module, dict[nn.Parameter, nn.Parameter]]:
    """The module on the host, with whole, plain parameters, and which of them stands for which.

    A Program is of the host until it is lowered, and means the same on every device.
    """
    host = host_device()
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        whole = whole.to(host, copy=True)
        replaced[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        memo[id(parameter)] = replaced[parameter]
    return copy.deepcopy(model, memo).to(host), replaced


def _optimizer_over(
    optimizer: torch.optim.Optimizer | None, replaced: dict[nn.Parameter, nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The same optimizer over other parameters; the states stay behind."""
    if optimizer is None:
        return None
    clone = copy.copy(optimizer)
    clone.__dict__ = dict(optimizer.__dict__)
    clone.param_groups = [
        {**group, "params": [replaced[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    clone.state = type(optimizer.state)(dict)
    return clone


def _global_batch(batch: Any, mesh: MeshShape) -> Any:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return batch
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch)
    by_part = {mesh.data_rank(rank): part for rank, part in enumerate(parts)}
    return pytree.tree_map(
        lambda *leaves: (
            torch.cat(leaves)
            if isinstance(leaves[0], torch.Tensor) and leaves[0].dim()
            else leaves[0]
        ),
        *by_part.values(),
    )
