"""``stepgraph.plan``: a plan for a cluster that is not there; and the public ``stepgraph.Plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.api.arguments import check_arguments, name_of
from stepgraph.api.models import find_model, language_model_loss
from stepgraph.api.planner import Planner, make_optimizer
from stepgraph.capture.module import LossFunction, default_loss
from stepgraph.cost.devices import find_device
from stepgraph.errors import CaptureError, MeshError, PlanError, UsageError
from stepgraph.lowering.graphs.obstacles import find_obstacles, of_error
from stepgraph.lowering.record import Obstacle
from stepgraph.memory.patterns import as_text
from stepgraph.memory.presets import parse_policy
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning import plan as data
from stepgraph.planning.decisions import FrontierPoint
from stepgraph.planning.difference import difference
from stepgraph.planning.file import load_plan, plan_from_json, plan_to_json, save_plan
from stepgraph.planning.request import AUTO, Precision, StepSettings, is_searched
from stepgraph.planning.sizes import parse_size
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.report.text import plan_page, plan_summary
from stepgraph.runtime.progress import Stages
from stepgraph.runtime.ranks import parse_mesh
from stepgraph.schedule.decide import check_schedule


@dataclass(frozen=True)
class Plan(data.Plan):
    """The four decisions for the programs of a training step: a value, and what can be computed of it."""

    def programs(
        self,
        model: str | nn.Module,
        *,
        example: Any,
        loss: LossFunction | None = None,
        optimizer: str | torch.optim.Optimizer | None = None,
        rank: int = 0,
    ) -> dict[str, Program]:
        """What a rank executes, scheduled and bound; nothing is launched.

        Args:
            model: as it was planned, or its name; it may be on the meta device, and is not changed.
            example: a batch of the global shape.
            loss: ``(model, batch) -> scalar``; by default as for Engine.
            optimizer: of the step, where its name does not say all.
            rank: whose programs are wanted.

        Returns:
            programs by name: ``step``, and ``accumulate`` with micro-batches.

        Raises:
            PlanError: the plan was made for another model or step.
        """
        planner = self._planner(model, example, loss, optimizer)
        return planner.programs(replace(self, final=True), rank)

    def _planner(
        self,
        model: str | nn.Module,
        example: Any,
        loss: LossFunction | None,
        optimizer: str | torch.optim.Optimizer | None,
    ) -> Planner:
        model, loss = _with_loss(model, loss)
        self.check_model(model)
        step = self.request.step
        device = find_device(self.request.device or torch_internals.host_device().type)
        made = make_optimizer(optimizer or step.optimizer, model)
        return Planner(model, example, loss, made, device, step)

    def obstacles(
        self,
        model: str | nn.Module,
        *,
        example: Any,
        loss: LossFunction | None = None,
        optimizer: str | torch.optim.Optimizer | None = None,
        rank: int = 0,
    ) -> list[Obstacle]:
        """What keeps the step from being one CUDA graph; nothing is launched, and no GPU is needed.

        Args:
            model, example, loss, optimizer, rank: as for :meth:`programs`.

        Returns:
            obstacles in order, empty if the step can be captured. Each has the stable name of its ``node``,
            the path of the ``module``, the ``source`` line, ``why`` it is one, and what to ``do``; of what
            cannot be captured as one program at all, the line alone.

        Raises:
            PlanError: the plan was made for another model or step.
        """
        planner = self._planner(model, example, loss, optimizer)
        try:
            programs = planner.decided(replace(self, final=bool(self.decisions)), rank)
        except CaptureError as error:
            return [of_error(error)]
        found = (one for p in programs.values() for one in find_obstacles(p, planner.target))
        return list(dict.fromkeys(found))

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The memory-time frontier: about a dozen ways to run the step, least memory to least time.

        Placements are the plan's; what is kept for the backward differs. Each point takes more memory and
        less time than the one before: ``peak_bytes`` of a rank, ``step_ms``, and what blocks ``keeps``.
        Deep models are estimated from short ones; others are simulated.

        Raises:
            PlanError: the plan was made without it.
        """
        if self.points is None:
            raise PlanError(
                "this plan holds no memory-time frontier",
                why="it takes longer to find than the plan, and was not asked for",
                do="make the plan again with stepgraph.plan(..., frontier=True)",
            )
        return self.points

    def diff(self, other: data.Plan) -> str:
        """What ``other`` decides otherwise, grouped; empty where nothing differs."""
        return difference(self, other)

    def report(self, path: str | Path | None = None) -> str:
        """The plan in words; an ``.html`` path writes the page."""
        if path is not None:
            Path(path).write_text(plan_page(self))
        return plan_summary(self)

    def __str__(self) -> str:
        return self.report()

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan file; the plan is final.

        Raises:
            PlanError: not a plan, malformed, of another version, or too large.
        """
        return public(load_plan(Path(path)))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return plan_to_json(self)

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            PlanError: malformed, or of another version.
        """
        return public(plan_from_json(plain))


def public(plan: data.Plan) -> Plan:
    """The same plan, with what can be computed of it."""
    return plan if isinstance(plan, Plan) else Plan(**vars(plan))


def plan(
    model: nn.Module | str,
    *,
    example: Any,
    mesh: str | tuple | MeshShape,
    loss: LossFunction | None = None,
    device: str = "h100",
    optimizer: str | torch.optim.Optimizer | None = "adamw",
    placement: str = AUTO,
    memory: str | Mapping[str, str] = AUTO,
    schedule: str = AUTO,
    memory_budget: int | str | None = None,
    compute_dtype: torch.dtype | None = torch.bfloat16,
    constraints: Mapping[str, str] | None = None,
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    frontier: bool = False,
) -> Plan:
    """Plans a training step for a mesh and a device that need not be at hand, and predicts it.

    Nothing runs; no process group is needed or left behind; the model is not changed.

    Args:
        model: a module, which may be on the meta device, or the name of a built-in model.
        example: a batch of the *global* shape (the rows of all ranks); fake and meta tensors are fine.
        mesh: ``"dp=16,tp=8"``, or a tuple of names and sizes: ``(("dp", 16), ("tp", 8))``.
        loss: ``(model, batch) -> scalar``; by default as for Engine.
        device: a name of the device table, such as ``h100``.
        optimizer: ``adamw``, ``adam``, ``sgd``, an optimizer over the model's parameters, or None.
        placement: ``auto``, or a preset such as ``tp+zero3``.
        memory: ``none``, ``full``, ``layers:N``, ``ops``, a table of modules' paths such as
            ``{"layers.*.mlp": "recompute", "layers.*": "offload"}``; ``budget:8GiB``: what takes least
            time while the predicted peak of a rank over the whole step stays within that; or ``auto``: the
            same within ``memory_budget``.
        schedule: ``auto`` or ``none``.
        memory_budget: bytes, or ``"70GiB"``: per rank, whole step, optimizer state included. Default:
            the device's capacity. Beside a named policy but ``none``, logits are computed in pieces where
            the step does not fit with whole ones.
        compute_dtype: parameters are cast to it in the program; None: they are not.
        constraints: for ``auto``: patterns of parameters, inputs or values to placements
            (``{"layers.*.weight": "S(0)R"}``), or a mesh dimension to a preset (``{"dp": "zero3"}``).
        micro_batches: the example is split into so many.
        max_grad_norm: gradients are clipped by their global norm (its value does not matter here).
        frontier: the plan holds its memory-time frontier (:meth:`Plan.frontier`).

    Returns:
        a Plan with ``predicted``, for ``Engine(plan=...)`` on that mesh, ``save`` and ``diff``.

    Raises:
        BudgetError: a budget was given, or ``memory="auto"``, and nothing fits; the message has the
            smallest peak that can be had.
        UsageError, MeshError, BatchError: arguments that cannot be used.
        CaptureError: the step cannot be captured as one program.
    """
    shape = mesh_shape(mesh)
    table = find_device(device)
    policy: str = as_text(memory)
    check_request(shape, placement, policy, constraints)
    check_schedule(schedule)
    budget = parse_size(memory_budget)
    made, loss = _with_loss(model, loss)
    check_arguments(made, None, micro_batches, None, compute_dtype, None)
    optimizer = make_optimizer(optimizer, made)
    precision = Precision(compute_dtype, None)
    step = StepSettings(name_of(optimizer), micro_batches, max_grad_norm is not None, precision)
    with Stages() as stages:

        def stage(name: str) -> None:
            stages.begin(f"planning {placement} on {shape}: {name}")

        planner = Planner(made, example, loss, optimizer, table, step, stage)
        asked = (policy, budget, constraints, schedule)
        attempt = planner.plan(shape, placement, *asked, last=True, frontier=frontier)
    if not attempt.fits and (is_searched(policy) or budget is not None):
        raise attempt.error()
    return public(attempt.plan)


def _with_loss(model: str | nn.Module, loss: LossFunction | None) -> tuple[nn.Module, LossFunction]:
    """A model, which is made on the meta device where it is a name, and the loss that is usual for it."""
    if not isinstance(model, str):
        return model, loss or default_loss
    return build_on_meta(find_model(model)), loss or language_model_loss


def check_request(
    mesh: MeshShape, placement: str, memory: str, constraints: Mapping[str, str] | None = None
) -> None:
    """Raises UsageError or MeshError for what can be seen to be wrong before anything is built."""
    check_preset(placement, mesh)
    if constraints and placement != AUTO:
        raise UsageError(
            f"constraints are for placement='auto', not {placement!r}",
            why="a preset says where everything lives already",
        )
    parse_policy(memory)


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without values, in training mode."""
    with torch.device("meta"):
        return make().train()


def mesh_shape(mesh: str | tuple | MeshShape) -> MeshShape:
    """The mesh of ``"dp=16,tp=8"``, ``(("dp", 16), ("tp", 8))`` or ``((16, 8), ("dp", "tp"))``.

    Raises:
        MeshError: none of these.
    """
    if isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(mesh, (tuple, list)) and all(isinstance(p, (tuple, list)) for p in mesh):
        if len(mesh) == 2 and all(isinstance(size, int) for size in mesh[0]):
            pairs = list(zip(mesh[1], mesh[0], strict=False))
        elif all(len(pair) == 2 for pair in mesh):
            pairs = [tuple(pair) for pair in mesh]
    texts = [f"{name}={size}" for name, size in pairs]
    if not texts:
        raise MeshError(
            f"a mesh is a text such as 'dp=16,tp=8', or names with sizes, not {mesh!r}",
            do="for example (('dp', 16), ('tp', 8))",
        )
    return parse_mesh(",".join(texts))
