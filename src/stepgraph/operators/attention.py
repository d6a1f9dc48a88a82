"""Attention: one operator on every device, its backward, and what both mean in plain arithmetic.

Traced, ``scaled_dot_product_attention`` is another operator on every device, and for some arguments none at
all but a dozen. Captured through :func:`attend` it is ``stepgraph::attention``; which kernel computes it is
chosen when a Program is lowered for a target (:mod:`stepgraph.lowering.attention`).
"""

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional

from stepgraph import torch_internals

aten = torch.ops.aten


class Call(NamedTuple):
    """One attention, as a kernel is asked for it.

    ``query`` is [batch, heads, queries, width], ``key`` [batch, heads or a divisor of them, keys, width],
    ``value`` like it, of any width; ``mask`` has four dimensions, those of size 1 repeated: bool (False
    hides a key), or added to the scores; ``keep``, bool [batch, heads, queries, keys], is what a dropout of
    ``dropout_p`` keeps.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    keep: Tensor | None
    is_causal: bool
    scale: float
    dropout_p: float


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` through the one operator.

    What torch draws for a dropout is drawn here, under the operator that a dropout always is.
    """
    if torch_internals.inside_transform(query) or not _is_regular(query, key, value, enable_gqa):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(low) if t.is_floating_point() else t for t in (query, key, value))
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        attn_mask = attn_mask.to(query.dtype)
    batch = query.shape[:-2]
    if not enable_gqa:
        batch = torch.broadcast_shapes(batch, key.shape[:-2], value.shape[:-2])
    grouped = batch[:-1] + key.shape[-3:-2] if enable_gqa else batch
    rows = [_four(t, lead) for t, lead in ((query, batch), (key, grouped), (value, grouped))]
    if attn_mask is not None:
        while attn_mask.dim() < len(batch) + 2:
            attn_mask = attn_mask.unsqueeze(0)
        if len(batch) != 2:
            attn_mask = _four(attn_mask, (*batch[:-1], attn_mask.shape[-3]))
    keep = None
    if dropout_p > 0.0:
        ones = query.new_ones((*rows[0].shape[:3], key.shape[-2]))
        keep = aten.native_dropout.default(ones, dropout_p, True)[1]
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    result, _ = ATTENTION(*rows, attn_mask, keep, is_causal, scale, dropout_p)
    return result if len(batch) == 2 else result.reshape(*batch, *result.shape[-2:])


def _is_regular(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Whether it is attention over batch and heads, of rows that are not empty."""
    plain = all(type(t).__name__ != "NestedTensor" and t.dim() >= 3 for t in (query, key, value))
    if not plain or not (query.numel() and key.numel() and value.numel()):
        return False
    if not grouped:
        return True
    same = query.dim() == key.dim() == value.dim() and query.shape[:-3] == key.shape[:-3]
    heads = key.shape[-3]
    return (
        same
        and heads == value.shape[-3]
        and value.shape[:-3] == key.shape[:-3]
        and query.shape[-3] % heads == 0
    )


def _four(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A tensor of four dimensions: ``lead`` is what stands before the last two, one of them heads."""
    if tensor.shape[:-2] != lead:
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) == 2:
        return tensor
    return tensor.reshape(math.prod(lead[:-1]), lead[-1], *tensor.shape[-2:])


# ------------------------------------------------------------------------------------------ meaning


def _wide(call: Call) -> Call:
    """The same call in float32 at least: two-byte types are only read and returned, as torch does it."""
    query, key, value, mask = (
        t.float() if t is not None and t.dtype in (torch.bfloat16, torch.float16) else t
        for t in call[:4]
    )
    return call._replace(query=query, key=key, value=value, mask=mask)  # type: ignore[arg-type]


def probabilities(call: Call) -> Tensor:
    """Softmax of the scores, before a dropout: [batch, heads, queries, keys]; 0 where all is hidden."""
    return aten._safe_softmax.default(_scores(call), -1)


def _scores(call: Call) -> Tensor:
    call, root = _wide(call), math.sqrt(call.scale)
    key = all_heads(call.key, call.query)
    scores = (call.query * root) @ (key.transpose(-2, -1) * root)
    if call.is_causal:
        seen = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores + _added(seen, scores)
    return scores if call.mask is None else scores + _added(call.mask, scores)


def _added(mask: Tensor, scores: Tensor) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, -math.inf).to(scores.dtype)


def all_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values of groups of heads, once for each head."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _dropped(call: Call, tensor: Tensor) -> Tensor:
    if call.keep is None:
        return tensor
    scale = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 0.0
    return tensor * call.keep.to(tensor.dtype) * scale


def plain_result(call: Call, shares: Tensor) -> Tensor:
    """The result, of what :func:`probabilities` gives; laid out as [batch, queries, heads, width]."""
    result = _dropped(call, shares) @ all_heads(_wide(call).value, call.query)
    return rows_first(result.to(call.query.dtype))


def rows_first(tensor: Tensor) -> Tensor:
    """The same values, heads beside each other: what follows attention joins them."""
    rows = tensor.transpose(1, 2)
    return aten.clone.default(rows, memory_format=torch.contiguous_format).transpose(1, 2)


def plain_gradients(
    call: Call, shares: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, and of the scores."""
    dtype, root = call.query.dtype, math.sqrt(call.scale)
    call, gradient = _wide(call), gradient.to(shares.dtype)
    key, value = (all_heads(t, call.query) for t in (call.key, call.value))
    of_value = _dropped(call, shares).transpose(-2, -1) @ gradient
    of_shares = _dropped(call, gradient @ value.transpose(-2, -1))
    of_scores = aten._softmax_backward_data.default(of_shares, shares, -1, shares.dtype)
    of_query = (of_scores @ (key * root)) * root
    of_key = (of_scores.transpose(-2, -1) @ (call.query * root)) * root
    groups = call.key.shape[1], call.value.shape[1]
    key_gradient, value_gradient = (
        t if t.shape[1] == n else t.unflatten(1, (n, -1)).sum(2)
        for t, n in zip((of_key, of_value), groups, strict=True)
    )
    found = (rows_first(t.to(dtype)) for t in (of_query, key_gradient, value_gradient))
    return (*found, of_scores)  # type: ignore[return-value]


def bias_gradient(mask: Tensor, of_scores: Tensor) -> Tensor:
    """The gradient of a mask that was added: summed where it was repeated."""
    repeated = [d for d in range(4) if mask.shape[d] == 1 and of_scores.shape[d] != 1]
    found = of_scores.sum(repeated, keepdim=True) if repeated else of_scores.clone()
    return found.to(mask.dtype)


# --------------------------------------------------------------------------------------- operators


@torch.library.custom_op("stepgraph::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """softmax(query key^T scale + mask) value, computed as it reads; arguments as in :class:`Call`.

    Returns:
        [batch, heads, queries, width of value], laid out with heads beside each other; and the logarithm of
        the sum of the exponentials of each row's scores, [batch, heads, queries], in float32 at least.
    """
    call = Call(query, key, value, mask, keep, is_causal, scale, dropout_p)
    sums = torch.logsumexp(_scores(call), -1)
    return plain_result(call, probabilities(call)), rows_first(sums)


@attention.register_fake
def _(query, key, value, mask, keep, is_causal, scale, dropout_p):
    batch, heads, queries, _ = query.shape
    result = query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)
    sums = query.new_empty((batch, queries, heads), dtype=_sums_dtype(query)).transpose(1, 2)
    return result, sums


def _sums_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("stepgraph::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    result: Tensor,
    sums: Tensor,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``result`` and ``sums`` are those of the forward."""
    call = Call(query, key, value, mask, keep, is_causal, scale, dropout_p)
    return plain_gradients(call, probabilities(call), gradient)[:3]


@torch.library.custom_op("stepgraph::attention_bias_backward", mutates_args=())
def attention_bias_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    keep: Tensor | None,
    result: Tensor,
    sums: Tensor,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`attention_backward`, and the gradient of a mask that was added."""
    call = Call(query, key, value, mask, keep, is_causal, scale, dropout_p)
    *found, of_scores = plain_gradients(call, probabilities(call), gradient)
    return (*found, bias_gradient(mask, of_scores))  # type: ignore[return-value]


def is_saved_inside(node: fx.Node) -> bool:
    """Whether a value is what an attention keeps for its own backward: the sums of its rows."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is ATTENTION and node.args[1] == 1


def _like(tensor: Tensor) -> Tensor:
    batch, heads, rows, width = tensor.shape
    return tensor.new_empty((batch, rows, heads, width)).transpose(1, 2)


@attention_backward.register_fake
def _(gradient, query, key, value, *others):
    return _like(query), _like(key), _like(value)


@attention_bias_backward.register_fake
def _(gradient, query, key, value, mask, *others):
    return (
        _like(query),
        _like(key),
        _like(value),
        torch.empty_like(mask, memory_format=torch.contiguous_format),
    )


def _remember(ctx, inputs, output) -> None:
    *tensors, is_causal, scale, dropout_p = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = is_causal, scale, dropout_p


def _differentiate(ctx, gradient, of_sums):
    arguments = (gradient, *ctx.saved_tensors, *ctx.numbers)
    if ctx.needs_input_grad[3]:
        found = ATTENTION_BIAS_BACKWARD(*arguments)
    else:
        found = (*ATTENTION_BACKWARD(*arguments), None)
    return *found, *[None] * 4


attention.register_autograd(_differentiate, setup_context=_remember)

ATTENTION = torch.ops.stepgraph.attention.default
ATTENTION_BACKWARD = torch.ops.stepgraph.attention_backward.default
ATTENTION_BIAS_BACKWARD = torch.ops.stepgraph.attention_bias_backward.default
BACKWARDS = (ATTENTION_BACKWARD, ATTENTION_BIAS_BACKWARD)
ATTENTIONS = (ATTENTION, *BACKWARDS)
