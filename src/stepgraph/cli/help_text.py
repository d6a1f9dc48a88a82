"""What help pages of commands share."""

from __future__ import annotations


def example(first: str, *rest: str) -> str:
    """A help page's example; click keeps the line breaks after its mark."""
    return "\n".join(["\b", "Example:", f"  stepgraph {first}", *(f"  {line}" for line in rest)])
