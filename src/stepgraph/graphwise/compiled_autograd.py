"""The backward of a module that runs graph by graph, as one compiled graph: compiled autograd.

Gradients start at values that this module hands out. Their backward, whoever calls it, runs that of the
forward behind them under compiled autograd: backward graphs, their collectives, hooks and code between
graphs are captured together.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.errors import CaptureError, StepgraphError, UsageError
from stepgraph.torch_internals import graphs as dynamo
from stepgraph.torch_internals import pytree
from stepgraph.torch_internals.hooks import gradient_hooks

NOTHING_TO_ADD = (
    "compiled autograd has nothing to add: the backward is one compiled program already"
)


def check_whole_backward(device: str | None = None) -> None:
    """Raises UsageError where this torch has no compiled autograd that works (for values on a device)."""
    problem = dynamo.compiled_autograd_problem(device)
    if problem is not None:
        raise UsageError(
            "compiled autograd does not work here", why=problem, do="leave it off, or update torch"
        )


# Those whose backwards are in torch's cache, which cannot be emptied for one of them alone.
_CAPTURED: set[weakref.ref] = set()


class WholeBackward:
    """Makes backwards run as one graph.

    Args:
        backend: compiles what is captured.
        limit: how often each captured backward may be compiled.
    """

    def __init__(self, backend: Callable, limit: int) -> None:
        self._backend, self._limit = backend, limit
        self._reached: list[tuple] = []
        self._task: int | None = None

    def start_from(self, result: Any, behind: Sequence[torch.Tensor]) -> Any:
        """A result of the forward, a backward from which is one graph.

        Args:
            behind: to whose ``.grad`` it adds. Autograd is told of them, so that a backward for some of
                them comes here as well, to be refused; not of those with hooks, which it would call twice.
        """
        leaves, tree = pytree.tree_flatten(result)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        told = [leaf for leaf in behind if not gradient_hooks(leaf)]
        values = self._start([leaves[i] for i in places], told)
        for index, value in zip(places, values, strict=True):
            leaves[index] = value
        return pytree.tree_unflatten(leaves, tree)

    def _start(self, values: list[torch.Tensor], told: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = [i for i, value in enumerate(values) if value.requires_grad]
        if not wanted:
            return values
        check_whole_backward(values[wanted[0]].device.type)
        anchor = torch.zeros((), requires_grad=True)
        started = _Start.apply(self, [values[i] for i in wanted], anchor, *told)
        for index, value in zip(wanted, started, strict=True):
            values[index] = value
        return values

    def reach(self, values: list[torch.Tensor], gradients: list[Any], keep: bool) -> None:
        """A backward has come to some values: it goes on from all of its, when it has come to the last."""
        task = dynamo.backward_now()
        if task != self._task:  # what an earlier one that failed left is void
            self._task, self._reached = task, []
            dynamo.after_backward(self._run)
        pairs = [(v, g) for v, g in zip(values, gradients, strict=True) if g is not None]
        self._reached += [(value, gradient, keep) for value, gradient in pairs]

    def _run(self) -> None:
        reached, self._reached, self._task = self._reached, [], None
        if not reached:
            return
        values, gradients, keep = zip(*reached, strict=True)
        _forget_if_all_are_gone()
        _CAPTURED.add(weakref.ref(self))
        compile_apart = functools.partial(_compile, self._backend, self._limit)
        try:
            with dynamo.compiled_autograd(compile_apart):
                torch.autograd.backward(values, gradients, retain_graph=any(keep))
        except torch_internals.GRAPH_BREAKS as error:
            raise CaptureError(
                "compiled autograd cannot capture this backward",
                why=str(error).strip().splitlines()[0],
                do="leave compiled autograd off (torch.utils.checkpoint across a graph break, or a hook "
                "that raises, does not go with it)",
            ) from error
        except torch_internals.DynamoError as error:
            inner = dynamo.inner_error(error)
            if isinstance(inner, StepgraphError):
                raise inner from inner.__cause__
            raise


def _compile(backend: Callable, limit: int, graph: torch.fx.GraphModule) -> Callable:
    """What torch's cache keeps must not hold whose backward it was."""
    return dynamo.compile_apart(graph, backend, limit, fullgraph=True)


def _forget_if_all_are_gone() -> None:
    """Before a backward is captured: what is captured or runs is in the cache."""
    all_gone = _CAPTURED and all(reference() is None for reference in list(_CAPTURED))
    if all_gone and dynamo.forget_backwards(_compile):
        _CAPTURED.clear()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, whole: WholeBackward, values: list, anchor: torch.Tensor, *leaves: torch.Tensor
    ):
        ctx.whole, ctx.values, ctx.leaves = whole, values, leaves
        ctx.set_materialize_grads(False)
        return tuple(value.detach().clone() for value in values)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a double backward (create_graph=True) cannot go through compiled autograd: switch it off"
            )
        if dynamo.is_for_chosen_inputs(ctx.leaves):
            raise UsageError(
                "gradients of chosen inputs cannot go through compiled autograd",
                why="the whole backward is one graph, captured for all of them",
                do="call backward() without inputs=, or switch compiled autograd off",
            )
        ctx.whole.reach(ctx.values, list(gradients), dynamo.keeps_graph())
        return None, None, None, *(None for _ in ctx.leaves)
