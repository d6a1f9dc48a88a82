"""What is asked of fx past its own methods: the same answers."""

import torch
from torch import fx

from stepgraph.torch_internals.code import call_node, copy_graph, copy_node, inputs_of

aten = torch.ops.aten


def example():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = call_node(graph, aten.add.Tensor, (x, y), {})
    joined = call_node(graph, aten.cat.default, ([total, x, total],), {})
    call_node(graph, aten.add.Tensor, (joined, joined), {"alpha": 2})
    for node in graph.nodes:
        node.meta["name"] = f"the {node}"
    return graph


def test_what_a_node_reads_is_what_fx_says():
    for node in example().nodes:
        assert [*inputs_of(node)] == node.all_input_nodes


def test_a_copy_has_the_same_nodes_and_metadata_of_its_own():
    graph = example()
    copy = copy_graph(graph)
    copy.lint()
    assert str(copy) == str(graph)
    for one, other in zip(graph.nodes, copy.nodes, strict=True):
        assert (one.name, one.meta) == (other.name, other.meta)
        assert one.meta is not other.meta and {*inputs_of(one)}.isdisjoint(inputs_of(other))


def test_what_is_added_to_a_copy_has_a_name_of_its_own():
    copy = copy_graph(example())
    x, *_ = copy.nodes
    added = [call_node(copy, aten.add.Tensor, (x, x), {}), copy_node(copy, x, lambda node: node)]
    names = [node.name for node in copy.nodes]
    assert len({*names}) == len(names) and {node.name for node in added} <= {*names}
    assert len(copy.find_nodes(op="call_function", target=aten.add.Tensor)) == 3


def test_a_copy_is_found_whole_where_nodes_are_gone():
    graph = example()
    last = next(reversed(graph.nodes))
    graph.erase_node(last)
    copy = copy_graph(graph)
    copy.lint()
    assert [node.name for node in copy.nodes] == [node.name for node in graph.nodes]
    assert len(copy.nodes) == len(graph.nodes)
