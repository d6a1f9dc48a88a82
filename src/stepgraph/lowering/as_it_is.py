"""Runs a piece operator by operator, in as few calls as that takes: the host's time is what it costs."""

import operator

import torch
from torch import fx

from stepgraph.lowering.bodies import Body
from stepgraph.lowering.driver import Compiled
from stepgraph.lowering.eager import operator_by_operator
from stepgraph.lowering.handed_on import floats, layout, root_of
from stepgraph.program.metadata import meta, set_meta
from stepgraph.torch_internals.code import graph_module
from stepgraph.torch_internals.storages import assert_layout, reinterpret

aten = torch.ops.aten


def as_it_is(body: Body) -> Compiled:
    """A callable that takes the list of what the body is given, and empties it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    _show_at_once(graph)
    for node in graph.find_nodes(op="call_function", target=aten.reshape.default):
        node.target = torch.reshape  # the same, without a call in Python
    _take_from_a_list(graph)
    return operator_by_operator(graph_module(body.root, graph))


def _take_from_a_list(graph: fx.Graph) -> None:
    """What is given is a list, which is emptied: who calls would hold arguments until the last is read."""
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_before(next(iter(graph.nodes))):
        given = graph.placeholder("given")
        for number, node in enumerate(inputs):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (given, number)))
        graph.call_method("clear", (given,))
    for node in inputs:
        graph.erase_node(node)


def _show_at_once(graph: fx.Graph) -> None:
    """What is seen through a chain of views is seen through one, or is there already."""
    checked: set[fx.Node] = set()
    views = [node for node in graph.nodes if floats(node)]
    for node in views:
        read_by = [user for user in node.users if not floats(user)]
        if not read_by:
            continue
        source = root_of(node)
        value = meta(source)["val"]
        shown = layout(node, source, value)
        if shown is None:
            continue
        with graph.inserting_before(node):
            if source not in checked:
                graph.call_function(assert_layout, (source, tuple(value.shape), value.stride()))
                checked.add(source)
            if shown == (tuple(value.shape), value.stride(), 0):
                at_once = source
            else:
                at_once = graph.call_function(reinterpret, (source, *shown))
                set_meta(at_once, meta(node))
        for user in read_by:
            user.replace_input_with(node, at_once)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)
