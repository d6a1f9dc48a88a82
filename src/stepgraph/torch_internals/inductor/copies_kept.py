"""A copy of what a graph overwrites stays a copy.

Inductor's passes are made for graphs that write nothing: there a copy may go, and so may a sum with zeros
or a product with ones. Of memory that is written later in the graph it would be the new value that is read.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from stepgraph.torch_internals.storages import shared_arguments

aten = torch.ops.aten
_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


class Hidden:
    """Operations whose operator no pass knows, until they are shown again."""

    def __init__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.post_grad import noop_registry

        self._behind: dict[Callable, Any] = {}
        copies, arithmetic = [], []
        for node in _of_written_memory(graph):
            if node.target in _ARITHMETIC:
                arithmetic.append(node)
            elif node.target in noop_registry:
                copies.append(node)
        self._arithmetic = [*map(self._hide, arithmetic)]
        for node in copies:
            self._hide(node)

    def _hide(self, node: fx.Node) -> fx.Node:
        target: Any = node.target

        def hidden(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

        self._behind[hidden] = target
        node.target = hidden
        return node

    def show_arithmetic(self) -> None:
        """What later passes may fuse, and do not take away."""
        for node in self._arithmetic:
            node.target = self._behind.get(node.target, node.target)  # type: ignore[arg-type]

    def show(self, graph: fx.Graph) -> None:
        """All that is hidden in a graph, which may be a copy of the first."""
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = self._behind.get(node.target, node.target)  # type: ignore[arg-type]


def _of_written_memory(graph: fx.Graph) -> Iterator[fx.Node]:
    """Operations that make memory of their own of memory that some operation of the graph writes."""
    root: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        of = (
            shared_arguments(node.target, node.args, node.kwargs)
            if node.op == "call_function"
            else ()
        )
        shared = [(writes, source) for writes, source in of if isinstance(source, fx.Node)]
        written |= {root[source] for writes, source in shared if writes}
        shown = [source for _, source in sorted(shared, key=lambda one: one[0])]  # a view's first
        root[node] = root[shown[0]] if shown else node
    for node in graph.nodes:
        makes = node.op == "call_function" and root[node] is node
        if makes and any(root[source] in written for source in node.all_input_nodes):
            yield node
