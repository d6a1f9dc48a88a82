"""``flex_attention`` where it has no kernel: torch's own plain form, and the check before it."""

import contextlib
from collections.abc import Iterator

import torch.nn.attention.flex_attention as _flex
from torch._higher_order_ops.flex_attention import flex_attention, math_attention

FLEX, SPELT_OUT = flex_attention, math_attention


@contextlib.contextmanager
def differentiable_on_host() -> Iterator[None]:
    """Within it, dynamo captures a call on the host that learns: it will run in another form."""
    check = _flex._validate_device
    _flex._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        _flex._validate_device = check
