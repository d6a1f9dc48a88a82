"""Several results of a graph that show one tensor which is none: it becomes one.

AOTAutograd has such views made again outside of a graph, from a tensor that it adds to the results; but not
where parameters are DTensors (2.13: "ANY output aliasing is currently unsupported"). Of a tensor that is a
result already it makes them there, too.
"""

import torch
from torch import fx

from stepgraph.torch_internals.export import example_value


def return_bases(graph: fx.GraphModule) -> int:
    """Appends them to the results of a graph of dynamo's; returns how many."""
    output = graph.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    shown: dict[int, list[fx.Node]] = {}
    for node in dict.fromkeys(results):
        if isinstance(node, fx.Node) and _is_view(value := example_value(node)):
            shown.setdefault(value.untyped_storage()._cdata, []).append(node)
    wanted = {storage for storage, views in shown.items() if len(views) > 1}
    bases = [
        node
        for node in graph.graph.nodes
        if wanted
        and isinstance(value := example_value(node), torch.Tensor)
        and value.layout == torch.strided
        and value.untyped_storage()._cdata in wanted
        and value._base is None
    ]
    more = [node for node in bases if node.op != "placeholder" and node not in results]
    if more:
        output.args = ((*results, *more),)
        graph.recompile()
    return len(more)


def _is_view(value: object) -> bool:
    """Whether a value is a view that a gradient goes through: others need no tensor to be made from."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value._base is not None
        and value.requires_grad
    )
