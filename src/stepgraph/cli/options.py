"""What commands share: options that mean the same in each that compiles a step, examples of help pages."""

from collections.abc import Callable

import click


def example(first: str, *rest: str) -> str:
    """A help page's example; click keeps the line breaks after its mark."""
    return "\n".join(["\b", "Example:", f"  stepgraph {first}", *(f"  {line}" for line in rest)])


def step_options(seq: int, batch_per_rank: int) -> Callable[[Callable], Callable]:
    """Declares them; their defaults differ."""
    from stepgraph.api import models  # imports torch, which a help page's example need not

    positive = click.IntRange(min=1)
    options = [
        click.option(
            "--model",
            required=True,
            metavar="MODEL",
            help=f"{', '.join(models.BUILT_IN)}; a config.json; or package.module:factory.",
        ),
        click.option("--plan", default="zero3", help="A preset or a plan file."),
        click.option(
            "--memory",
            help="none, full, layers:N, ops or MODULE=recompute (save, offload). Default: the plan's own.",
        ),
        click.option("--batch-per-rank", type=positive, default=batch_per_rank),
        click.option("--seq", type=click.IntRange(min=2), default=seq),
        click.option("--micro-batches", type=positive, default=1),
        click.option(
            "--max-grad-norm",
            type=click.FloatRange(min=0, min_open=True),
            help="Clip gradients to this norm.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0),
        click.option(
            "--lr", type=click.FloatRange(min=0), default=1e-3, help="Learning rate of AdamW."
        ),
    ]

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
