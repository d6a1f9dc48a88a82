"""What DTensor of one release has and of another has not: rules that say all, that are right, sizes."""

import functools
import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def knows_every_way(op: Any) -> bool:
    """Whether DTensor says of an operator all placements that are right, on one mesh dimension.

    Its older rules follow an argument as it is placed, and say of that one alone.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    return op in getattr(propagator, "op_single_dim_strategy_funcs", {})


@functools.cache
def copy_uneven_shards() -> None:
    """Lets autograd's copy of a gradient be sharded as the gradient is, in this process.

    Under compiled autograd it fills a ``new_empty_strided``, which torch 2.11 replicates where shards are
    uneven: a gradient became whole, by an all-gather more. ``new_empty`` has the same rule without that.
    (The rule stays: its answers are cached, and hold for what autograd copies anywhere.)
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._op_schema import OpSchema

    from stepgraph.torch_internals import planning_mesh, sharding_strategies, tensor_spec

    whole, strided = torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default
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


def _group_norm_sizes(specs: list[Any], schema: Any) -> Any:
    """``native_group_norm(input, weight?, bias?, N, C, HxW, ...)`` with the sizes of a rank's part."""
    from torch.distributed.tensor._op_schema import OpSchema
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(
        specs[0].tensor_meta.shape, specs[0].mesh, specs[0].placements
    )
    sizes = (shape[0], shape[1], math.prod(shape[2:]))
    return OpSchema(
        schema.op, (*schema.args_schema[:3], *sizes, *schema.args_schema[6:]), schema.kwargs_schema
    )


# Where a torch has no table of them.
SIZE_ADJUSTERS = {torch.ops.aten.native_group_norm.default: _group_norm_sizes}
