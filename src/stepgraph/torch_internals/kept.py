"""What torch's partitioners keep of a traced region for its backward, said of every operation.

They know the policies of ``torch.utils.checkpoint``, which are asked as operations are traced, one after
the other. So the operation behind a mark is kept, and every other one is computed again.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_MARK = torch.ops.aten.alias.default  # compilers drop it
PLANNED = 0  # the number of a region that a plan has decided: torch counts others from 1


def mark(graph: fx.Graph, kept: Iterable[fx.Node]) -> None:
    """Sets a mark before each of the operations; one that reads no tensor is computed again."""
    for node in kept:
        for source in node.all_input_nodes[:1]:
            with graph.inserting_before(node):
                marked = graph.call_function(_MARK, (source,))
            marked.meta = {**source.meta}
            node.replace_input_with(source, marked)


def keep_what_is_marked(function: Callable, *tensors: torch.Tensor) -> Any:
    """A call of a forward, for dynamo to trace; without marks, nothing is kept."""
    return _called(function, tensors, _of_forward)


def keep_in_backward(function: Callable, *tensors: torch.Tensor) -> Any:
    """A call of a backward: what it gathers of parameters alone could be in the forward, too, and would."""
    return _called(function, tensors, _of_backward)


def _called(function: Callable, tensors: Iterable[torch.Tensor], contexts: Callable) -> Any:
    with torch.enable_grad():  # else no policy is asked
        alone = [tensor.detach() for tensor in tensors]
        return checkpoint(function, *alone, use_reentrant=False, context_fn=contexts)


_Contexts = tuple[AbstractContextManager, AbstractContextManager]


def _of_forward() -> _Contexts:
    return _contexts("")


def _of_backward() -> _Contexts:
    return _contexts("must_be_in_backward")


def _contexts(side: str) -> _Contexts:
    mode, again = create_selective_checkpoint_contexts(_Marked())
    mode.__class__ = _of_one_region(type(mode), side)
    return mode, again


@functools.cache
def _of_one_region(kind: type, side: str) -> type:
    return type("OneRegion", (_OneRegion, kind), {"side": side})


class _Marked:
    """The policy; it has seen a mark, or not."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept, self.seen = self.seen, operation is _MARK
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE


class _OneRegion:
    """Forward and backward are one region: torch keeps what goes from one region to another.

    What is made of no tensor, within an operation that is decomposed, is made again. ``side``: torch's tag
    of operations that may be nowhere else; empty: there is none.
    """

    side: str

    @property
    def ac_graph_id(self) -> int:
        return PLANNED

    @ac_graph_id.setter
    def ac_graph_id(self, number: int) -> None: ...

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = get_proxy_mode()
        nodes = [] if tracing is None else tracing.tracer.graph.nodes
        before = len(nodes)
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]
        for node in itertools.islice(reversed(nodes), len(nodes) - before):
            if not node.all_input_nodes:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            if self.side:
                node.meta["partitioner_tag"] = self.side
        return result
