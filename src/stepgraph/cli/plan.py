"""``stepgraph plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from stepgraph.api.plan import public
from stepgraph.api.planner import Attempt
from stepgraph.cli.comparing import PlanOptions, count_stages, list_jobs, run_jobs
from stepgraph.cli.help_text import example
from stepgraph.cli.progress import Stages
from stepgraph.planning.request import AUTO
from stepgraph.report.plan_text import comparison, plan_page, plan_summary, ranked

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
@click.option("--device", default="h100", show_default=True, help="A name of the device table.")
@click.option(
    "--batch-per-rank",
    type=_POSITIVE,
    default=2,
    show_default=True,
    help="Sequences of each data-parallel rank.",
)
@click.option("--seq", type=click.IntRange(min=2), default=8192, show_default=True)
@click.option("--plan", default=AUTO, show_default=True, help="auto or a preset.")
@click.option(
    "--memory",
    default=AUTO,
    show_default=True,
    help="none, full, layers:N; auto: the first of none, layers:2, full that fits.",
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
    with Stages(count_stages(jobs)) as stages:
        attempts = run_jobs(options, jobs, stages.begin)
    best = _best(attempts)
    # What was asked for in so many words is shown, though it does not fit the device.
    refused = not best.fits and (options.memory == AUTO or options.memory_budget is not None)
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
