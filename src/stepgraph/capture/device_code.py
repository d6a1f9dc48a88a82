"""Model code that asks which device it is on.

A step is captured on the host, and its code is told that its tensors are where it will run
(:func:`stepgraph.torch_internals.other_device.told_of`). Where that makes a difference, the same model on
the host is another one: that is found by tracing it once more, untold, and comparing call by call.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from stepgraph import torch_internals
from stepgraph.capture.annotations import source_line
from stepgraph.torch_internals import export

ASKS = frozenset({"is_cuda", "is_cpu"})


def asks_for_device(codes: Iterable[CodeType], device_type: str) -> bool:
    """Whether functions that are not torch's own name a kind of device, or ask for one."""
    host = torch_internals.host_device().type
    if device_type == host:
        return False
    kinds = {host, device_type}
    mine = (code for code in codes if not code.co_filename.startswith(torch.__path__[0]))
    return any(ASKS & {*code.co_names} or kinds & {*_texts(code.co_consts)} for code in mine)


def difference_notes(
    there: fx.GraphModule, module: nn.Module, tensors: Sequence[torch.Tensor], device_type: str
) -> list[str]:
    """What to say of a module that is another one on the host, if it is.

    Args:
        there: what dynamo captured of its code, told that it is on the device.
        tensors: fake ones, of the call.
    """
    try:
        on_host = export.export_graph(module, tuple(tensors)).graph
    except (*torch_internals.GRAPH_BREAKS, torch_internals.DynamoError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        return [f"the model is for {device_type} alone, on the host it cannot be captured: {why}"]
    found = first_difference(there.graph, on_host.graph)
    if found is None:
        return []
    calls = [_call(node) if node is not None else "nothing more" for node in found]
    line = _line(found[0]) or _line(found[1])
    return [
        f"the model computes something else on {device_type} than on the host, first at {line}: "
        f"{calls[0]}, on the host {calls[1]}"
    ]


def first_difference(a: fx.Graph, b: fx.Graph) -> tuple[fx.Node | None, fx.Node | None] | None:
    """The first two calls that differ in what is called, with what, or in shape or type of the result."""
    for pair in itertools.zip_longest(_calls(a), _calls(b)):
        one, other = (call[1] if call is not None else None for call in pair)
        if one != other:
            return tuple(call[0] if call is not None else None for call in pair)  # type: ignore
    return None


def _calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any]]:
    number: dict[fx.Node, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        return "device" if isinstance(value, torch.device) else str(value)

    for node in graph.nodes:
        number[node] = len(number)
        if node.op in ("placeholder", "output"):
            continue
        given = map_aggregate((node.args, node.kwargs), plain)
        value = export.example_value(node)
        results = torch_internals.pytree.tree_leaves(value)
        kinds = [(t.shape, t.dtype) for t in results if isinstance(t, torch.Tensor)]
        yield node, (node.op, str(node.target), repr(given), kinds)


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant.split(":")[0]
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _line(node: fx.Node | None) -> str | None:
    trace = export.stack_trace(node) if node is not None else None
    return source_line(trace) if trace else None


def _call(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    given = ", ".join(map(str, (*node.args, *node.kwargs.values())))
    return f"{name}({given})"
