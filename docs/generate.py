"""Writes the reference pages that come from docstrings: ``docs/passes.md`` and ``docs/errors.md``.

python docs/generate.py          # a test fails where the pages are out of date
"""

from __future__ import annotations

import inspect
from pathlib import Path

from stepgraph import errors

def passes_page() -> str:
    """Every pass in the order it runs, with its docstring."""
    parts = [
        "# Passes\n",
        "In the order they run. Generated from the docstrings by `docs/generate.py`.\n",
    ]
    for room, rewrite in PASSES:
        text = inspect.getdoc(rewrite) or ""
        if "see the module docstring" in text:
            text = inspect.getdoc(inspect.getmodule(rewrite)) or ""
        parts.append(f"## `{rewrite.__name__}`\n\nIn `{room}/`.\n\n{text}\n")
    return "\n".join(parts)


def errors_page() -> str:
    """Every error class with its docstring; the anchors are what messages point to."""
    parts = ["# Errors\n", "Generated from the docstrings by `docs/generate.py`.\n"]
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.StepgraphError):
            parts.append(f"## {name}\n\n{inspect.getdoc(error)}\n")
    return "\n".join(parts)


PAGES = {"passes.md": passes_page, "errors.md": errors_page}


def main() -> None:
    """Writes both pages beside this file."""
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page())


if __name__ == "__main__":
    main()
