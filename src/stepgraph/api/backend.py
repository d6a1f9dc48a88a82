"""The backend behind ``torch.compile(..., backend="stepgraph")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from stepgraph.errors import UsageError, near_misses
from stepgraph.graphwise.compiler import GraphCompiler
from stepgraph.lowering.lower import check_lowering
from stepgraph.memory import presets as memory_policies

OPTIONS = ("memory", "lowering")


def stepgraph_backend(
    graph: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """The backend behind ``torch.compile(model, backend="stepgraph")``: one process, no placement.

    Args:
        options: ``{"memory": "full", "lowering": "eager"}``.

    Raises:
        UsageError: an unknown option, or a mode, which stepgraph has none of.
    """
    options = dict(options or {})
    if mode not in (None, "default"):
        raise UsageError(f"stepgraph has no mode {mode!r}", do="leave it out")
    for name in options:
        if name not in OPTIONS:
            raise UsageError(f"unknown option {name!r}", do=near_misses(name, OPTIONS))
    compiler = GraphCompiler(**options)
    memory_policies.parse_policy(compiler.memory)
    check_lowering(compiler.lowering)
    return compiler(graph, examples)
