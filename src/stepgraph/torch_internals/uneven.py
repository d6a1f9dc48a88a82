"""Gradients of uneven shards, as DTensor copies them."""

import functools

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._python_dispatch import _disable_current_modes

from stepgraph.torch_internals import planning_mesh, sharding_strategies, tensor_spec


@functools.cache
def copy_uneven_shards() -> None:
    """Lets autograd's copy of a gradient be sharded as the gradient is, in this process.

    Under compiled autograd it fills a ``new_empty_strided``, which torch 2.11 replicates where shards are
    uneven: a gradient became whole, by an all-gather more. ``new_empty`` has the same rule without that.
    (The rule stays: its answers are cached, and hold for what autograd copies anywhere.)
    """
    whole, strided = torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default
    with _disable_current_modes():  # whatever the backward runs on
        value = torch.empty(3, device="meta")
        spec = tensor_spec(planning_mesh((2,)), (Shard(0),), value)
        ways = sharding_strategies(strided, (spec, [3], [1]), {}, value)
    if any(results == [Shard(0)] for _, results in ways):
        return
    propagator = DTensor._op_dispatcher.sharding_propagator
    rules = propagator.op_strategy_funcs
    rules[strided] = lambda schema: rules[whole](
        OpSchema(whole, schema.args_schema, schema.kwargs_schema)
    )
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    if forget := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None):
        forget()
