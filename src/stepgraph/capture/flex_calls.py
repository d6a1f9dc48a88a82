"""A call of ``flex_attention`` in a graph of dynamo's, as the one operator that a Program has for it."""

from typing import Any

import torch
from torch import Tensor, fx

from stepgraph.operators.flex import FLEX, SCORE
from stepgraph.operators.scalar_functions import POSITIONS, text_of
from stepgraph.torch_internals import flex
from stepgraph.torch_internals.export import example_value


def one_operator(node: fx.Node) -> tuple[Any, ...] | None:
    """Arguments of :func:`attend` for a call in a graph of dynamo's; None where that cannot be it."""
    query, key, value, score, mask, scale, options, *others = node.args
    assert isinstance(mask, tuple) and isinstance(options, dict)
    lengths, blocks, between, sizes = mask[:2], mask[2:10], mask[10:-3], mask[-3:-1]
    q, k, v = (example_value(x) for x in (query, key, value))  # type: ignore[arg-type]
    held = [x for x in blocks if x is not None]
    score_others, mask_others = map(list, others or ((), ()))  # type: ignore[arg-type]
    regular = (
        not node.kwargs
        and not any(_is_read(user) for user in node.users if user.args[1] != 0)
        and q.dtype == k.dtype == v.dtype
        and q.is_floating_point()
        and q.shape[0] == k.shape[0] == v.shape[0]
        and all(t.numel() for t in (q, k, v))
        and len(held) in (4, 8)
        and len([x for x in blocks[4:6] if x is not None]) == 2  # a backward reads queries by keys
        and all(x is None for x in between)
        and all(isinstance(x, int) for x in (*lengths, *sizes))
        and isinstance(scale, float)
        and all(isinstance(x, fx.Node) for x in (*score_others, *mask_others))
    )
    if not regular:
        return None
    module = node.graph.owning_module
    texts = [
        text_of(flex.scalar_graph(getattr(module, function.target)), names)
        for function, names in ((score, SCORE), (mask[-1], POSITIONS))  # type: ignore[union-attr]
    ]
    if None in texts:
        return None
    numbers = [*lengths, *sizes, len(between)]
    options = {name: value for name, value in options.items() if not name.startswith("OUTPUT_")}
    tensors = query, key, value, score_others, mask_others, held
    return (*tensors, *texts, scale, numbers, repr(options))


def _is_read(node: fx.Node) -> bool:
    """Whether a value of dynamo's graph goes into its results; dynamo leaves behind what does not."""
    reached = {node}
    waiting = [node]
    while waiting:
        new = waiting.pop().users.keys() - reached
        reached |= new
        waiting += new
    return any(user.op == "output" for user in reached)


def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """torch's operator through this one, but for sums that nobody reads.

    The arguments are those of :class:`stepgraph.operators.flex.Flex`.
    """
    if torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(low) for t in (query, key, value))
    result, sums = FLEX(query, key, value, *others)
    return result, sums, sums
