"""What commands share: options that mean the same in each that compiles a step, examples of help pages."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from stepgraph.api import models

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


def example(first: str, *rest: str) -> str:
    """A help page's example; click keeps the line breaks after its mark."""
    return "\n".join(["\b", "Example:", f"  stepgraph {first}", *(f"  {line}" for line in rest)])


def step_options(seq: int, batch_per_rank: int) -> Callable[[_AnyFunction], _AnyFunction]:
    """Declares them; their defaults differ."""
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
