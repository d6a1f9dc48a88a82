"""The backend behind ``torch.compile(..., backend="stepgraph")``: one graph after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.errors import UsageError, near_misses
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.lowering.decide import check_target
from stepgraph.memory.decide import check_memory
from stepgraph.planning.request import Request
from stepgraph.planning.target import usual_target
from stepgraph.program.layout import data_mesh
from stepgraph.torch_internals import host_device

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
    request = Request("ddp", data_mesh(1), **options)
    check_memory(request.memory)
    tensors = [x for x in examples if isinstance(x, torch.Tensor)]
    device = tensors[0].device if tensors else host_device()
    target = usual_target(device.type)
    check_target(request.lowering, target)
    return GraphCompiler(request, target)(graph, examples)
