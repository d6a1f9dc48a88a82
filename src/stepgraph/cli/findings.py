"""What the doctor found: one line of its report, and the report as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

OK, FAILED, NOT_HERE = "ok", "failed", "not here"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    ``found``: what there is, or why it does not work. ``do``: what to do about it. ``needed``: without it
    training does not work here.
    """

    name: str
    status: str
    found: str
    do: str = ""
    needed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing that is needed is missing."""
        return self.status == OK or not self.needed


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
    rows: list[dict[str, Any]] = [vars(check) for check in checks]
    return json.dumps({"ok": all(check.ok for check in checks), "checks": rows}, indent=2)
