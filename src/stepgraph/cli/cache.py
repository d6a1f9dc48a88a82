"""``stepgraph cache``."""

import json
import time

import click
from rich.console import Console
from rich.table import Table

from stepgraph.cli.options import example
from stepgraph.lowering.cache import LIMIT, clear, entries, folder_of_cache


@click.command("cache", epilog=example("cache --clear"))
@click.option("--clear", "remove", is_flag=True, help="Remove all of it.")
@click.option("--json", "as_json", is_flag=True, help="Print what is kept as JSON.")
def cache_command(remove: bool, as_json: bool) -> None:
    """Shows what was compiled and is kept on disk, or removes it.

    A program that is there is not compiled again, by any process of this user. What was unused for longest
    is removed by itself.
    """
    root = folder_of_cache()
    if remove:
        click.echo(f"removed {clear(root) / 2**20:.1f} MiB from {root}")
        return
    kept = entries(root)
    if as_json:
        rows = [{"folder": e.folder.name, "bytes": e.bytes, "used": e.used} for e in kept]
        click.echo(json.dumps({"folder": str(root), "limit": LIMIT, "entries": rows}, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("folder", str(root))
    size = sum(entry.bytes for entry in kept)
    table.add_row("kept", f"{len(kept)} compiled graphs, {size / 2**20:.1f} MiB")
    table.add_row("limit", f"{LIMIT / 2**20:.0f} MiB")
    if kept:
        days = [(time.time() - entry.used) / 86400 for entry in (kept[0], kept[-1])]
        table.add_row("last used", f"{days[0]:.1f} to {days[1]:.1f} days ago")
    Console().print(table, soft_wrap=True)
