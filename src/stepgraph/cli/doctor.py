"""``stepgraph doctor``."""

from __future__ import annotations

import sys

import click

from stepgraph.cli.calibrate import calibrate as measure
from stepgraph.cli.diagnosis import diagnose
from stepgraph.cli.findings import show, to_json
from stepgraph.cli.help_text import example


@click.command("doctor", epilog=example("doctor --json"))
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
    if calibrate:
        path = measure(lambda name: click.echo(f"measuring {name}", err=True))
        click.echo(path.read_text() if as_json else f"wrote {path}")
        return
    checks = diagnose(lambda name: click.echo(f"looking at {name}", err=True))
    if as_json:
        click.echo(to_json(checks))
    else:
        show(checks)
    if not all(check.ok for check in checks):
        sys.exit(1)
