"""The command line: results on standard output, progress and errors on standard error.

Exit codes: 0 fine, 1 failed, 2 bad usage; 130 and 143, stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
import torch

from stepgraph.api import models
from stepgraph.api.arguments import compute_dtype_in
from stepgraph.api.plan import Plan
from stepgraph.cli.help_text import example
from stepgraph.cli.plan import explain_command, plan_command
from stepgraph.cli.training import Summary, TrainOptions, train
from stepgraph.errors import StepgraphError, UsageError
from stepgraph.memory.presets import parse_policy
from stepgraph.placement.presets.named import check_preset
from stepgraph.planning.request import Precision
from stepgraph.runtime.ranks import parse_mesh

FAILED, BAD_USAGE = 1, 2

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


class _Commands(click.Group):
    """Turns an error that stepgraph raised on purpose into its message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StepgraphError as error:
            # On a rank, bad usage arrives as the cause of the launcher's error.
            cause = error.__cause__ if isinstance(error.__cause__, UsageError) else error
            click.echo(f"stepgraph: {cause}", err=True)
            ctx.exit(BAD_USAGE if isinstance(cause, UsageError) else FAILED)


def _shared_options(seq: int, batch_per_rank: int) -> Callable[[_AnyFunction], _AnyFunction]:
    """Options that mean the same in every command that compiles a step."""
    positive = click.IntRange(min=1)
    options = [
        click.option(
            "--model",
            required=True,
            metavar="MODEL",
            help=f"{', '.join(models.BUILT_IN)}; a config.json; or package.module:factory.",
        ),
        click.option("--plan", default="zero3", show_default=True, help="A preset or a plan file."),
        click.option("--memory", help="none, full or layers:N. Default: the plan's own."),
        click.option("--batch-per-rank", type=positive, default=batch_per_rank, show_default=True),
        click.option("--seq", type=click.IntRange(min=2), default=seq, show_default=True),
        click.option("--micro-batches", type=positive, default=1, show_default=True),
        click.option(
            "--max-grad-norm",
            type=click.FloatRange(min=0, min_open=True),
            help="Clip gradients to this norm.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        click.option(
            "--lr",
            type=click.FloatRange(min=0),
            default=1e-3,
            show_default=True,
            help="Learning rate of AdamW.",
        ),
    ]

    def decorate(command: _AnyFunction) -> _AnyFunction:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example("train --model llama-tiny --text notes.txt --ranks 2"),
)
@click.version_option(package_name="stepgraph")
def main() -> None:
    """Compiles a PyTorch training step: forward, backward and optimizer as one program."""


@main.command(
    "train",
    epilog=example(
        "train --model llama-tiny --text notes.txt --ranks 2 --plan zero3 \\",
        "    --steps 200 --metrics run.jsonl --sample 200",
    ),
)
@_shared_options(seq=128, batch_per_rank=8)
@click.option("--text", required=True, metavar="PATH", help="A file, or a folder of text files.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes to start on this machine. Default: what the mesh holds, else 1.",
)
@click.option("--mesh", help="Names and sizes, as in dp=2. Default: every rank on dp.")
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--lowering", help="inductor or eager. Default: the plan's own.")
@click.option("--metrics", metavar="FILE", help="Append one JSON object per step.")
@click.option(
    "--checkpoint",
    metavar="DIR",
    help="Save here while training. SIGINT and SIGTERM then save and leave, with exit code 130 or 143.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Steps from one save to the next; the last two complete ones stay.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the last complete save under --checkpoint, or begin where there is none. "
    "--steps is the total; --metrics loses what came after the save.",
)
@click.option("--sample", type=click.IntRange(min=0), default=0, help="Then write N bytes of text.")
@click.option("--strict", is_flag=True, help="A fallback that would be reported is an error.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def train_command(as_json: bool, **options: Any) -> None:
    """Trains MODEL on the bytes of a text, on ranks of this machine or under torchrun."""
    summary = train(TrainOptions(**options))
    if summary is None:
        return
    click.echo(json.dumps(summary.to_json()) if as_json else show_summary(summary))
    if summary.stopped_by is not None:
        sys.exit(128 + signal.Signals[summary.stopped_by])


@main.command(
    "check", epilog=example("check --model llama-tiny --mesh dp=4 --plan zero3 --memory full")
)
@_shared_options(seq=64, batch_per_rank=2)
@click.option("--mesh", required=True, help="Names and sizes, as in dp=4; all in this process.")
def check_command(
    model: str,
    plan: str,
    memory: str | None,
    batch_per_rank: int,
    seq: int,
    micro_batches: int,
    max_grad_norm: float | None,
    seed: int,
    lr: float,
    mesh: str,
) -> None:
    """Runs a step before and after every pass, all ranks in this process, and compares.

    Exits with 1 and names the first pass whose result differs.
    """
    from stepgraph.equivalence.check import check_model

    shape = parse_mesh(mesh)
    loaded = Plan.load(plan) if plan.endswith(".json") else None
    check_preset(plan if loaded is None else loaded.placement, shape)
    if memory is not None:
        parse_policy(memory)
    made = models.build_model(model, seed).train()
    compute = None
    if loaded is not None:
        loaded.check_model(made)
        compute = compute_dtype_in(loaded, None)
    generator = torch.Generator().manual_seed(seed)
    rows = batch_per_rank * shape.data_size
    vocabulary = models.vocabulary_size(made, otherwise=256)
    ids = torch.randint(vocabulary, (rows, seq), generator=generator)
    report = check_model(
        made,
        loss=models.language_model_loss,
        optimizer=torch.optim.AdamW(made.parameters(), lr=lr),
        batch={"input_ids": ids, "labels": ids.clone()},
        mesh=mesh,
        plan=plan if loaded is None else loaded,
        memory=memory,
        precision=Precision(compute, None),
        micro_batches=micro_batches,
        max_grad_norm=max_grad_norm,
    )
    click.echo(str(report))
    if not report.ok:
        click.echo(f"stepgraph: the first pass that differs: {report.first_difference}", err=True)
        sys.exit(FAILED)


main.add_command(plan_command)
main.add_command(explain_command)


# -- results


def show_summary(summary: Summary) -> str:
    """The summary, the loss curve and the sample as text."""
    rows = [
        ("model", f"{summary.model}, {summary.parameters / 1e6:,.1f} million parameters"),
        ("plan", f"{summary.plan} on {summary.mesh} ({summary.device})"),
        ("loss", _show_losses(summary)),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s (median step)"),
        ("peak memory", f"{summary.peak_bytes / 2**30:.2f} GiB on the first rank"),
        ("compilation", f"{summary.compile_seconds:.1f} s of {summary.seconds:.1f} s"),
    ]
    if summary.saved_to is not None:
        rows.append(("saved to", summary.saved_to))
    parts = ["\n".join(f"{name:<12} {text}" for name, text in rows)]
    if summary.losses:
        parts.append(loss_curve(summary.losses, first_step=summary.first_step))
    if summary.sample is not None:
        parts.append(f"sample, continuing {summary.prompt!r}:\n{summary.sample}")
    return "\n\n".join(parts)


def _show_losses(summary: Summary) -> str:
    if not summary.losses:
        return f"no step was left: {summary.steps} have been taken"
    count = len(summary.losses)
    whole = f"{count} steps" if summary.first_step == 1 else f"the last {count} of {summary.steps}"
    return f"{summary.first_loss:.3f} -> {summary.last_loss:.3f} in {whole}"


def loss_curve(
    losses: list[float], width: int = 60, height: int = 8, *, first_step: int = 1
) -> str:
    """A plot in characters: each column is the mean of a stretch of steps."""
    columns = min(width, len(losses))
    edges = [len(losses) * i // columns for i in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    levels = [round((mean - low) / span * (height - 1)) for mean in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{low + span * level / (height - 1):8.3f}"
        marks = "".join("*" if level == mine else " " for mine in levels)
        lines.append(f"{label} |{marks}".rstrip())
    ends = f"steps {first_step} to {first_step + len(losses) - 1}"
    return "\n".join([*lines, " " * 9 + "+" + "-" * columns, " " * 10 + ends])


# -- doctor


@main.command("doctor", epilog=example("doctor --json"))
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure this machine, for predictions, instead of checking it.",
)
def doctor_command(as_json: bool, calibrate: bool) -> None:
    """Says what this machine has, and tries what works on it and what does not.

    Exits with 1 where something that training needs does not work.
    """
    from stepgraph.cli import calibrate as calibration
    from stepgraph.cli import doctor

    if calibrate:
        path = calibration.calibrate(lambda name: click.echo(f"measuring {name}", err=True))
        click.echo(path.read_text() if as_json else f"wrote {path}")
        return
    checks = doctor.diagnose(lambda name: click.echo(f"looking at {name}", err=True))
    if as_json:
        click.echo(doctor.to_json(checks))
    else:
        doctor.show(checks)
    if not all(check.ok for check in checks):
        sys.exit(FAILED)
