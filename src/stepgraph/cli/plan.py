"""``stepgraph plan``: one model, several meshes and placements, one capture a batch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from stepgraph.api.models import find_model
from stepgraph.api.plan import check_request, public
from stepgraph.api.planner import STAGES, Attempt
from stepgraph.cli.options import example
from stepgraph.cli.plans.jobs import Job, PlanOptions, run_jobs
from stepgraph.cli.plans.processes import workers_for
from stepgraph.cli.progress import Stages
from stepgraph.cost.device import Device
from stepgraph.cost.devices import find_device
from stepgraph.errors import MeshError, UsageError
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning.request import AUTO
from stepgraph.planning.sizes import parse_size
from stepgraph.program.layout import MeshShape
from stepgraph.program.mesh_roles import Role
from stepgraph.report.text import comparison, plan_page, plan_summary, ranked
from stepgraph.runtime.ranks import parse_mesh

_POSITIVE = click.IntRange(min=1)


@click.command(
    "plan",
    epilog=example(
        "plan llama3-8b --mesh dp=16,tp=8 --device h100 -o plan.json",
        "stepgraph plan llama3-8b --mesh dp=16,tp=8 --compare zero3,tp+zero3,auto",
        "stepgraph plan llama3-8b --mesh auto --ranks 128",
    ),
)
@click.argument("model", metavar="MODEL")
@click.option(
    "--mesh",
    multiple=True,
    required=True,
    help="Names and sizes, as in dp=16,tp=8; several are compared; auto tries the sensible ones.",
)
@click.option("--ranks", type=_POSITIVE, help="Of --mesh auto.")
@click.option("--device", default="h100", help="A name of the device table.")
@click.option(
    "--batch-per-rank",
    type=_POSITIVE,
    default=2,
    help="Sequences of each data-parallel rank.",
)
@click.option("--seq", type=click.IntRange(min=2), default=8192)
@click.option("--plan", default=AUTO, help="auto or a preset.")
@click.option(
    "--memory",
    default=AUTO,
    help="none, full, layers:N, ops, MODULE=recompute (or save, offload); budget:SIZE: the fastest in it; "
    "auto: that fits.",
)
@click.option("--memory-budget", help="Such as 70GiB, a rank. Default: the device's capacity.")
@click.option("--compare", metavar="PLANS", help="Several presets and auto, side by side.")
@click.option("-o", "--output", metavar="FILE", help="Write the (fastest) plan here, as JSON.")
@click.option("--html", metavar="FILE", help="Write a page about it here.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan file's object.")
def plan_command(as_json: bool, **given: Any) -> None:
    """Plans a training step of MODEL for a cluster, without the cluster, and predicts it.

    MODEL is a built-in name, a transformers config.json, or package.module:factory.
    """
    options = PlanOptions(**given)
    jobs = list_jobs(options)
    with Stages(count_stages(jobs)) as stages, workers_for(options, jobs, stages.begin) as workers:
        attempts = run_jobs(options, jobs, workers, stages.say)
    best = _best(attempts)
    refused = not best.fits and options.refuses
    if len(attempts) > 1:
        _show_many(attempts, as_json)
    if refused:
        raise best.error()
    if options.output is not None:
        public(best.plan).save(options.output)
    if options.html is not None:
        Path(options.html).write_text(plan_page(best.plan, options.model))
    if len(attempts) == 1:
        shown = plan_summary(best.plan, options.model)
        click.echo(json.dumps(public(best.plan).to_json()) if as_json else shown)


def _best(attempts: list[Attempt]) -> Attempt:
    """The fastest that fits, or the one that comes closest to fitting."""
    fitting = [attempt for attempt in attempts if attempt.fits]
    if not fitting:
        return min(attempts, key=lambda attempt: attempt.peak)
    first, _ = ranked([(attempt.plan, True) for attempt in fitting])[0]
    return next(attempt for attempt in fitting if attempt.plan is first)


def _show_many(attempts: list[Attempt], as_json: bool) -> None:
    rows = [(attempt.plan, attempt.fits) for attempt in attempts]
    if not as_json:
        click.echo(comparison(rows))
        return
    table = []
    for plan, fits in ranked(rows):
        assert plan.predicted is not None
        table.append(
            {
                "mesh": str(plan.mesh),
                "placement": plan.placement,
                "memory": plan.memory,
                "fits": fits,
                "notes": plan.notes,
                "predicted": plan.predicted.to_json(),
            }
        )
    click.echo(json.dumps(table))


# -- the plans to make


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


# -- which meshes to try


def meshes_to_try(
    asked: Sequence[str], ranks: int | None, device: Device
) -> tuple[list[MeshShape], bool]:
    """The meshes to plan for, and whether they were chosen here.

    Args:
        asked: mesh strings, all of one world size; or ``auto`` alone.
        ranks: of ``auto``; otherwise None, or what the meshes hold.

    Raises:
        UsageError, MeshError: contradictions, names without a role.
    """
    if AUTO in asked:
        if len(asked) > 1:
            raise UsageError("--mesh auto stands alone", do="name meshes, or let them be chosen")
        if ranks is None:
            raise UsageError("--mesh auto needs to know how many ranks", do="add --ranks 128")
        return sensible_meshes(ranks, device.ranks_per_node), True
    meshes = [parse_mesh(text) for text in asked]
    sizes = {mesh.world_size for mesh in meshes} | ({ranks} if ranks is not None else set())
    if len(sizes) > 1:
        shown = ", ".join(f"{mesh} has {mesh.world_size}" for mesh in meshes)
        asked_for = "" if ranks is None else f"; --ranks is {ranks}"
        raise MeshError(
            f"meshes are compared on one number of ranks: {shown}{asked_for}",
            do="give meshes whose sizes multiply to the same number",
        )
    return list(dict.fromkeys(meshes)), False


def sensible_meshes(ranks: int, ranks_per_node: int) -> list[MeshShape]:
    """Data and tensor parallelism, the latter inside a node; and shards inside a node, replicas between.

    For 16 ranks in nodes of 8: ``dp=16``, ``dp=8,tp=2``, ... ``dp=2,tp=8``, ``replicate=2,shard=8``,
    ``replicate=2,shard=4,tp=2``, ...
    """
    tensor = [tp for tp in range(1, min(ranks, ranks_per_node) + 1) if ranks % tp == 0]
    tensor = [tp for tp in tensor if ranks_per_node % tp == 0]
    found = [_mesh((Role.DATA, ranks // tp), (Role.TENSOR, tp)) for tp in tensor]
    for tp in tensor:
        shard = ranks_per_node // tp
        if shard > 1 and ranks % ranks_per_node == 0 and ranks > ranks_per_node:
            parts = (Role.REPLICATE, ranks // ranks_per_node), (Role.SHARD, shard)
            found.append(_mesh(*parts, (Role.TENSOR, tp)))
    return list(dict.fromkeys(found))


def _mesh(*dims: tuple[Role, int]) -> MeshShape:
    """Without a dimension of one rank, but for the first."""
    kept = (dim for i, dim in enumerate(dims) if i == 0 or dim[1] > 1)
    return MeshShape(tuple((role.dim, size) for role, size in kept))


def placement_on(mesh: MeshShape, placement: str) -> str | None:
    """A placement as a mesh of one's own choosing takes it; None where it does not.

    ``zero3`` on replicas of shards is ``hsdp``.
    """
    for name in (placement, placement.replace("zero3", "hsdp")):
        try:
            check_preset(name, mesh)
        except MeshError:
            continue
        return name
    return None
