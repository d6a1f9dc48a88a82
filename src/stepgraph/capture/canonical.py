"""Calls that devices trace into other operators become the one operator that a Program has for them.

dynamo's graph holds the call as the model wrote it, the same on every device; what AOTAutograd makes of it
depends on where the tensors are. So this is done between the two, on both roads.
"""

import types
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.nn import functional

from stepgraph.capture import embeddings, flex_calls
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
    "flex_attention, in {} places, is computed in plain arithmetic: it holds all scores"
)


def canonicalise(graph: fx.GraphModule) -> list[str]:
    """Rewrites such calls in a graph of dynamo's and in those inside it (checkpointed regions).

    Returns:
        notes on what could not be.
    """
    irregular, any_sparse = 0, False
    for module in [m for m in graph.modules() if isinstance(m, fx.GraphModule)]:
        sparse = embeddings.settle(module.graph)
        any_sparse = any_sparse or sparse
        found = [node for node in module.graph.nodes if node.target in CANONICAL]
        for node in found:
            node.target = CANONICAL[node.target]
        calls = [node for node in module.graph.nodes if node.target is flex.FLEX]
        for node in calls:
            arguments = flex_calls.one_operator(node)
            irregular += arguments is None
            node.target = flex.spelt_out
            if arguments is not None:
                node.target, node.args = flex_calls.attend, arguments
        if found or calls or sparse:
            module.recompile()
    notes = [embeddings.DENSE] if any_sparse else []
    return notes + ([FLEX_IS_SPELT_OUT.format(irregular)] if irregular else [])
