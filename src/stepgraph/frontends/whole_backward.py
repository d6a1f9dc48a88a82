"""The backward of a module that runs graph by graph, as one compiled graph: compiled autograd.

Gradients start at values that this module hands out. Their backward, whoever calls it, runs that of the
forward behind them under compiled autograd: backward graphs, their collectives, hooks and code between
graphs are captured together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepgraph.errors import UsageError
from stepgraph.torch_internals import graphs as dynamo


def check_whole_backward() -> None:
    """Raises UsageError where this torch has no compiled autograd that works."""
    problem = dynamo.compiled_autograd_problem()
    if problem is not None:
        raise UsageError(
            "compiled autograd does not work here", why=problem, do="leave it off, or update torch"
        )


class WholeBackward:
    """Makes backwards run as one graph.

    Args:
        backend: compiles what is captured.
        limit: how often each captured backward may be compiled.
    """

    def __init__(self, backend: Callable, limit: int) -> None:
        self._backend, self._limit = backend, limit

    def start(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same values, from which a backward goes through one graph."""
        wanted = [i for i, value in enumerate(values) if value.requires_grad]
        if not wanted:
            return values
        anchor = torch.zeros((), requires_grad=True)
        started = _Start.apply(self, [values[i] for i in wanted], anchor)
        for index, value in zip(wanted, started, strict=True):
            values[index] = value
        return values

    def run(self, values: list[torch.Tensor], gradients: list[Any], keep: bool) -> None:
        """The backward from some values."""
        pairs = [(v, g) for v, g in zip(values, gradients, strict=True) if g is not None]
        with dynamo.compiled_autograd(self._compile):
            torch.autograd.backward(
                [value for value, _ in pairs], [g for _, g in pairs], retain_graph=keep
            )

    def _compile(self, graph: torch.fx.GraphModule) -> Callable:
        return dynamo.compile_apart(graph, self._backend, self._limit, fullgraph=True)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: WholeBackward, values: list[torch.Tensor], anchor: torch.Tensor):
        ctx.whole, ctx.values = whole, values
        ctx.set_materialize_grads(False)
        return tuple(value.detach().clone() for value in values)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a double backward (create_graph=True) cannot go through compiled autograd: switch it off"
            )
        ctx.whole.run(ctx.values, list(gradients), dynamo.keeps_graph())
        return None, None, None
