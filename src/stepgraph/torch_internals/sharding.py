"""What DTensor of one release has and of another has not: whether a rule says all, sizes of group norm."""

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
