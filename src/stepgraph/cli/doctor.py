"""``stepgraph doctor``."""

import json
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepgraph.cli.calibrate import calibrate as measure
from stepgraph.cli.diagnosis import FAILED, NOT_HERE, OK, Check, diagnose
from stepgraph.cli.options import example


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


_STYLES = {OK: "green", FAILED: "bold red", NOT_HERE: "dim"}


def show(checks: list[Check]) -> None:
    """Prints a table to standard output."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        status = Text(check.status, _STYLES[check.status])
        table.add_row(Text(check.name), status, Text(check.found))
        if check.do:
            table.add_row("", "", Text(f"what to do: {check.do}", "yellow"))
    Console().print(table)


def to_json(checks: list[Check]) -> str:
    """``{"ok": ..., "checks": [{"name": ..., "status": ..., ...}]}``."""
    ok = all(check.ok for check in checks)
    return json.dumps({"ok": ok, "checks": [vars(check) for check in checks]}, indent=2)
