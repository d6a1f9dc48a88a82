"""The command line: results on standard output, progress and errors on standard error.

Exit codes: 0 fine, 1 failed, 2 bad usage; 130 and 143, stopped by SIGINT and SIGTERM.
"""

import importlib
import signal
from typing import Any

import click

from stepgraph.cli.fork_server import start_server
from stepgraph.cli.options import example
from stepgraph.errors import StepgraphError, UsageError

FAILED, BAD_USAGE, STOPPED = 1, 2, 128 + signal.SIGINT
COMMANDS = ("train", "plan", "explain", "check", "doctor", "cache")


class _Commands(click.Group):
    """Turns an error that stepgraph raised on purpose into its message and an exit code.

    A command is imported when it is asked for: most need all of torch.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"stepgraph.cli.{cmd_name}"), f"{cmd_name}_command")

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        start_server(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StepgraphError as error:
            # On a rank, bad usage arrives as the cause of the launcher's error.
            cause = error.__cause__ if isinstance(error.__cause__, UsageError) else error
            click.echo(f"stepgraph: {cause}", err=True)
            ctx.exit(BAD_USAGE if isinstance(cause, UsageError) else FAILED)
        except KeyboardInterrupt:
            click.echo("stepgraph: stopped", err=True)
            ctx.exit(STOPPED)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=example("train --model llama-tiny --text notes.txt --ranks 2"),
)
@click.version_option(package_name="stepgraph")
def main() -> None:
    """Compiles a PyTorch training step: forward, backward and optimizer as one program."""
