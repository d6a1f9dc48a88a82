"""Planning from the command line: one model, several meshes and placements, one capture a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stepgraph.api.arguments import name_of
from stepgraph.api.models import find_model, language_model_loss
from stepgraph.api.plan import build_on_meta, check_request, parse_size
from stepgraph.api.planner import STAGES, Attempt, Planner, make_optimizer
from stepgraph.cli.meshes import meshes_to_try, placement_on
from stepgraph.cost.devices import find_device
from stepgraph.errors import MeshError, UsageError
from stepgraph.planning.request import AUTO, Precision, StepSettings
from stepgraph.program.layout import MeshShape


@dataclass(frozen=True)
class PlanOptions:
    """What ``stepgraph plan`` was asked for."""

    model: str
    mesh: tuple[str, ...]
    ranks: int | None = None
    device: str = "h100"
    batch_per_rank: int = 2
    seq: int = 8192
    plan: str = AUTO
    memory: str = AUTO
    memory_budget: str | None = None
    compare: str | None = None
    output: str | None = None
    html: str | None = None


@dataclass(frozen=True)
class Job:
    """One plan to be made."""

    mesh: MeshShape
    placement: str


def list_jobs(options: PlanOptions) -> list[Job]:
    """Everything that is to be planned; nothing is built yet.

    Raises:
        UsageError, MeshError: options that cannot work.
    """
    device = find_device(options.device)
    find_model(options.model)
    parse_size(options.memory_budget)
    for path in (options.output, options.html):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"there is no folder for {path!r}", do="create it")
    meshes, chosen = meshes_to_try(options.mesh, options.ranks, device)
    names = [name.strip() for name in (options.compare or options.plan).split(",")]
    jobs = []
    for mesh in meshes:
        for name in names:
            placement = placement_on(mesh, name) if chosen or len(meshes) > 1 else name
            if placement is None:
                continue
            check_request(mesh, placement, options.memory)
            jobs.append(Job(mesh, placement))
    if not jobs:
        check_request(meshes[0], names[0], options.memory)
        raise MeshError(f"no mesh has what {', '.join(names)} needs")
    return list(dict.fromkeys(jobs))


def count_stages(jobs: Sequence[Job]) -> int:
    """How many stages planning goes through, at least."""
    return len({job.mesh.data_size for job in jobs}) + len(jobs) * (len(STAGES) - 1)


def run_jobs(
    options: PlanOptions, jobs: Sequence[Job], stage: Callable[[str], None]
) -> list[Attempt]:
    """Plans in the order of the jobs; jobs with a global batch in common share a capture."""
    device = find_device(options.device)
    budget = parse_size(options.memory_budget)
    model = build_on_meta(find_model(options.model))
    optimizer = make_optimizer("adamw", model)
    found: dict[Job, Attempt] = {}
    for size in dict.fromkeys(job.mesh.data_size for job in jobs):
        ids = torch.empty(
            options.batch_per_rank * size, options.seq, dtype=torch.int64, device="meta"
        )
        planner = Planner(
            model,
            {"input_ids": ids, "labels": ids},
            language_model_loss,
            optimizer,
            device,
            StepSettings(name_of(optimizer), precision=Precision(torch.bfloat16)),
            stage=stage,
        )
        mine = [job for job in jobs if job.mesh.data_size == size]
        for job in mine:
            found[job] = planner.plan(
                job.mesh, job.placement, options.memory, budget, last=job is mine[-1]
            )
    return [found[job] for job in jobs]
