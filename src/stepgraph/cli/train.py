"""``stepgraph train``."""

import json
import signal
import sys
from dataclasses import asdict
from typing import Any

import click

from stepgraph.cli.options import example, step_options
from stepgraph.cli.training import Summary, TrainOptions, train


@click.command(
    "train",
    epilog=example(
        "train --model llama-tiny --text notes.txt --ranks 2 --plan zero3 \\",
        "    --steps 200 --metrics run.jsonl --sample 200",
    ),
)
@step_options(seq=128, batch_per_rank=8)
@click.option("--text", required=True, metavar="PATH", help="A file, or a folder of text files.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes to start on this machine. Default: what the mesh holds, else 1.",
)
@click.option("--mesh", help="Names and sizes, as in dp=2. Default: every rank on dp.")
@click.option("--steps", type=click.IntRange(min=1), default=200)
@click.option("--lowering", help="inductor, eager or cuda_graph. Default: the plan's own.")
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
    help="Steps from one save to the next; the last two complete ones stay.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the last complete save under --checkpoint, or begin where there is none. "
    "--steps is the total; --metrics loses what came after the save.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    default=0,
    show_default=False,
    help="Then write N bytes of text.",
)
@click.option("--strict", is_flag=True, help="A fallback that would be reported is an error.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def train_command(as_json: bool, **options: Any) -> None:
    """Trains MODEL on the bytes of a text, on ranks of this machine or under torchrun."""
    summary = train(TrainOptions(**options))
    if summary is None:
        return
    click.echo(json.dumps(asdict(summary)) if as_json else show_summary(summary))
    if summary.stopped_by is not None:
        sys.exit(128 + signal.Signals[summary.stopped_by])


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
