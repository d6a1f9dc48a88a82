"""Calls that devices trace into other operators become the one operator that a Program has for them.

dynamo's graph holds the call as the model wrote it, the same on every device; what AOTAutograd makes of it
depends on where the tensors are. So this is done between the two, on both roads.
"""

import types
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.nn import functional

from stepgraph.operators.attention import attend
from stepgraph.torch_internals import flex


def _calling(function: types.FunctionType, **instead: Any) -> Callable:
    """The same Python code, with other functions under some of its names; its own is the copy's."""
    names = {**function.__globals__, **instead}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = (
        copy  # what watches calls (a function mode) is handed it, and calls it
    )
    return copy


CANONICAL: dict[Any, Callable] = {
    functional.scaled_dot_product_attention: attend,
    functional.multi_head_attention_forward: _calling(
        functional.multi_head_attention_forward, scaled_dot_product_attention=attend
    ),
}


FLEX_IS_SPELT_OUT = (
    "flex_attention is computed in plain arithmetic, so that it can be placed: it holds all scores"
)


def canonicalise(graph: fx.GraphModule) -> None:
    """Rewrites such calls in a graph of dynamo's and in those inside it (checkpointed regions)."""
    _call_instead(graph, CANONICAL)


def spell_out_flex(graph: fx.GraphModule) -> bool:
    """Has the scores of ``flex_attention``, and what the model makes of them, as operations like any other.

    Returns:
        whether there was one.
    """
    return _call_instead(graph, {flex.FLEX: flex.SPELT_OUT})


def _call_instead(graph: fx.GraphModule, table: dict[Any, Callable]) -> bool:
    any_found = False
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found = [node for node in module.graph.nodes if node.target in table]
        for node in found:
            node.target = table[node.target]
        if found:
            module.recompile()
            any_found = True
    return any_found
