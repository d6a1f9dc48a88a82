"""Graph modules whose code is generated when it is to run: passes only rewrite their graphs.

fx generates and compiles it for every new module, and never forgets the text. And what passes ask of every
node of a graph, which fx answers slowly.
"""

import operator
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.node import map_arg

inputs_of: Callable[[fx.Node], Collection[fx.Node]] = operator.attrgetter("_input_nodes")
"""What a node reads, each once, in order: to be looked through at once.

``fx.Node.all_input_nodes`` makes a list of it, three times as slow, for what every pass asks of every node.
"""


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, with the attributes of ``root`` that it reads."""
    return _LazyGraphModule(root, graph)


def generating_late() -> AbstractContextManager[None]:
    """Modules that torch makes within generate their code late, too: most of them never run."""
    return _use_lazy_graph_module(True)


def generate_code(module: fx.GraphModule) -> None:
    """The code of the graph as it is now."""
    module.recompile()
    if isinstance(module, _LazyGraphModule):
        module.real_recompile()


def copy_node(graph: fx.Graph, node: fx.Node, instead: Callable[[fx.Node], Any]) -> fx.Node:
    """:meth:`fx.Graph.node_copy`, where a graph inserts now, of a node without symbolic numbers.

    ``fx.Graph.create_node`` walks through all arguments to find one (torch 2.13).
    """
    name = graph._graph_namespace.create_name(node.name, None)
    return _copy_as(graph, name, node, instead)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have the names, and copies of the metadata, of those of a graph."""
    copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    names, of = copy._graph_namespace, graph._graph_namespace
    names._used_names |= of._used_names
    names._base_count |= of._base_count
    for node in graph.nodes:
        copied[node] = _copy_as(copy, node.name, node, copied.__getitem__)
    return copy


def call_node(graph: fx.Graph, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    """:meth:`fx.Graph.call_function`, without symbolic numbers, as :func:`copy_node` has it."""
    name = graph._graph_namespace.create_name(graph._target_to_str(target), None)
    return _put(graph, name, "call_function", target, args, kwargs)


def _copy_as(
    graph: fx.Graph, name: str, node: fx.Node, instead: Callable[[fx.Node], Any]
) -> fx.Node:
    args, kwargs = map_arg((node.args, node.kwargs), instead)
    new = _put(graph, name, node.op, node.target, args, kwargs, node.type)
    new.meta.update(node.meta)  # assigning an attribute of a node takes it out of its graph's table
    return new


def _put(
    graph: fx.Graph, name: str, op: str, target: Any, args: Any, kwargs: Any, type: Any = None
) -> fx.Node:
    new = fx.Node(graph, name, op, target, args, kwargs, type)
    graph._graph_namespace.associate_name_with_obj(name, new)
    graph._insert(new)
    graph._find_nodes_lookup_table.insert(new)
    graph._len += 1
    return new
