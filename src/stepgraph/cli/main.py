"""The command line: results on standard output, progress and errors on standard error.

Exit codes: 0 fine, 1 failed, 2 bad usage; 130 and 143, stopped by SIGINT and SIGTERM.
"""

from typing import Any

import click

from stepgraph.cli.cache import cache_command
from stepgraph.cli.check import check_command
from stepgraph.cli.doctor import doctor_command
from stepgraph.cli.explain import explain_command
from stepgraph.cli.options import example
from stepgraph.cli.plan import plan_command
from stepgraph.cli.train import train_command
from stepgraph.errors import StepgraphError, UsageError

FAILED, BAD_USAGE = 1, 2


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


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=example("train --model llama-tiny --text notes.txt --ranks 2"),
)
@click.version_option(package_name="stepgraph")
def main() -> None:
    """Compiles a PyTorch training step: forward, backward and optimizer as one program."""


for _command in (
    train_command, plan_command, explain_command, check_command, doctor_command, cache_command,
):  # fmt: skip
    main.add_command(_command)
