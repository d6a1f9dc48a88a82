"""Results of a graph of dynamo's that are views: AOTAutograd has them made again outside of the graph.

It makes them with a gradient, those too that the code made under ``torch.no_grad()`` (2.13, and so trains
``torch.compile``): they are detached. It makes them from a tensor that it adds to the results where they
show one that is none; but not where parameters are DTensors ("ANY output aliasing is currently
unsupported"): it becomes a result before.
"""

import functools
from collections.abc import Callable

import torch
from torch import fx

from stepgraph.errors import CaptureError
from stepgraph.torch_internals.export import example_value, set_example_value
from stepgraph.torch_internals.storages import memory_of

_REFUSED = "output aliasing"


def detach_views(graph: fx.GraphModule) -> None:
    """What is made without a gradient, and returned, has none."""
    output, enabled = graph.graph.output_node(), True
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    detached: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled and node in results and _memory(value := example_value(node)):
            with graph.graph.inserting_before(output):
                detached[node] = graph.graph.call_method("detach", (node,))
            detached[node].meta.update(node.meta)
            set_example_value(detached[node], value.detach())
    if detached:
        output.args = (tuple(detached.get(node, node) for node in results),)
        graph.recompile()


def with_bases(graph: fx.GraphModule, compile_it: Callable[[], Callable]) -> Callable:
    """Compiles a graph of dynamo's; where that is refused, with the tensors that its results show.

    Raises:
        CaptureError: what they show is nowhere in the graph.
    """
    try:
        return compile_it()
    except AssertionError as error:
        if _REFUSED not in str(error):
            raise
        output = graph.graph.output_node()
        before = output.args
        if not (bases := _bases(graph)):
            raise CaptureError(
                "between two graph breaks the code makes several views of a tensor that it does not have",
                do="clone() them, or remove the graph break behind them",
            ) from error
    output.args = ((*before[0], *bases),)  # type: ignore[misc]
    graph.recompile()
    compiled = compile_it()
    output.args = before
    graph.recompile()

    @functools.wraps(compiled)
    def call(*inputs: object) -> object:
        return compiled(*inputs)[: -len(bases)]

    return call


def _bases(graph: fx.GraphModule) -> list[fx.Node]:
    """What several results show, and is none itself."""
    results = graph.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    shown: dict[int, list[torch.Tensor]] = {}
    for node in dict.fromkeys(results):
        if isinstance(node, fx.Node) and (key := _memory(value := example_value(node))):
            shown.setdefault(key, []).append(value)
    wanted = {
        key
        for key, views in shown.items()
        if len(views) > 1 and any(view.requires_grad and view._base is not None for view in views)
    }
    return [
        node
        for node in graph.graph.nodes
        if node.op != "placeholder"
        and _memory(value := example_value(node)) in wanted
        and value._base is None
    ]


def _memory(value: object) -> int | None:
    """Which memory a value shows; None: it is no tensor."""
    return memory_of(value) if isinstance(value, torch.Tensor) else None
