"""Writes the reference pages that come from the source: passes, errors and the public API.

python docs/generate.py          # a test fails where the pages are out of date
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import stepgraph
from stepgraph import errors
from stepgraph.pipeline import ROADS
from stepgraph.program.record import Pass


def passes_page() -> str:
    """Every stretch of road with its passes, from their records."""
    parts = [
        "# Passes\n",
        "The stretches of road of `pipeline.py`, each with its passes in the order they run. Generated "
        "from the records by `docs/generate.py`.\n",
    ]
    told: set[str] = set()
    for road, steps in ROADS.items():
        parts.append(f"## Road: {road}\n\n" + ", ".join(f"`{step.name}`" for step in steps) + "\n")
        for step in steps:
            if step.name not in told:
                parts.append(_pass(step))
                told.add(step.name)
    return "\n".join(parts)


def _pass(step: Pass) -> str:
    module = inspect.getmodule(step.rewrite)
    text = inspect.getdoc(step.rewrite) or ""
    if "see the module docstring" in text:
        text = inspect.getdoc(module) or ""
    room = step.rewrite.__module__.split(".")[1]
    held_to = "what it computed before" if step.reference is None else "a reference of its own"
    rows = {
        "reads": step.reads,
        "writes": step.writes,
        "preserves": step.preserves + ("" if step.functional else "; not functional any more"),
        "held to": held_to,
    }
    told = "\n".join(f"- {name}: {value}" for name, value in rows.items())
    return f"### `{step.name}`\n\nIn `{room}/`.\n\n{text}\n\n{told}\n"


def errors_page() -> str:
    """Every error class with its docstring; the anchors are what messages point to."""
    parts = ["# Errors\n", "Generated from the docstrings by `docs/generate.py`.\n"]
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.StepgraphError):
            parts.append(f"## {name}\n\n{inspect.getdoc(error)}\n")
    return "\n".join(parts)


def api_page() -> str:
    """Every public name with its signature and docstring, methods included."""
    parts = [
        "# Public API\n",
        "What `import stepgraph` gives. Generated from the docstrings by `docs/generate.py`.\n",
    ]
    for name in stepgraph.__all__:
        thing = getattr(stepgraph, name)
        parts.append(_entry("##", f"stepgraph.{name}", thing))
        if inspect.isclass(thing):
            for member, value in _members(thing):
                parts.append(_entry("###", f"{name}.{member}", value))
    return "\n".join(parts)


def _members(thing: type) -> list[tuple[str, Any]]:
    own = {}
    for base in reversed([b for b in thing.__mro__ if b.__module__.startswith("stepgraph")]):
        own |= vars(base)
    members = [(name, value) for name, value in own.items() if not name.startswith("_")]
    if "__call__" in own:
        members.append(("__call__", own["__call__"]))
    return [(name, value) for name, value in members if inspect.getdoc(value) and _is_told(value)]


def _is_told(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (property, staticmethod, classmethod))


def _entry(heading: str, name: str, thing: Any) -> str:
    inner = getattr(thing, "__func__", thing)
    shown = "" if isinstance(thing, property) else _signature(name.split(".")[-1], inner)
    return f"{heading} `{name}`\n\n{shown}{inspect.getdoc(thing)}\n"


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return ""
    text = str(inspect.signature(thing)).replace("'", "")
    lines = text if len(text) < 90 else text.replace(", ", ",\n    ").replace("(", "(\n    ", 1)
    return f"```python\n{name}{lines}\n```\n\n"


def releases_page() -> str:
    """What passes on which release of torch, from the committed runs."""
    runs = json.loads((Path(__file__).parents[1] / "benchmarks/results/releases.json").read_text())
    parts = [
        "# Releases of torch\n",
        "The suite (`make test TORCH=...`) on each release, on machines without a GPU. Generated from "
        "`benchmarks/results/releases.json` by `docs/generate.py`. A newer release is tried by "
        "`stepgraph doctor`, never refused.\n",
    ]
    columns = ("built for", "commit", "passed", "failed", "errors", "skipped")
    rows = [("torch", *columns), ("---",) * (1 + len(columns))]
    rows += [(version, *(str(run[name]) for name in columns)) for version, run in runs.items()]
    parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    for version, run in runs.items():
        if run["why"]:
            why = "\n".join(f"- {count} x `{text}`" for text, count in run["why"].items())
            parts.append(f"\n## Why on {version}\n\n{run.get('note', '')}\n\n{why}")
    return "\n".join(parts) + "\n"


PAGES = {
    "passes.md": passes_page,
    "errors.md": errors_page,
    "api.md": api_page,
    "releases.md": releases_page,
}


def main() -> None:
    """Writes the pages beside this file."""
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page())


if __name__ == "__main__":
    main()
