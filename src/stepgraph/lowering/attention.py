"""The kernels that an attention may become, and what each of them asks for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.lowering.graphs.draws import LIMIT, drawing
from stepgraph.operators.attention import (
    Call,
    bias_gradient,
    plain_gradients,
    plain_result,
    probabilities,
)
from stepgraph.torch_internals import operators as private

Saved = tuple[Any, ...]
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)


@dataclass(frozen=True)
class Kernel:
    """One way to compute an attention and its gradients.

    Attributes:
        device_type: where it is; empty: everywhere.
        refuses: ``(call, learns) -> why it cannot``, or an empty text; ``learns``: a gradient of the mask
            is asked for.
        forward: ``(call, key) -> (result, saved)``; ``key``: None, or what a dropout is keyed by: a number
            on the host, another of the operation.
        backward: ``(call, saved, result, gradient, learns) -> gradients of query, key, value (and mask)``.
        draws: it draws a dropout itself; else it reads what is kept.
        quadratic: it holds a score for each query and key.
    """

    name: str
    device_type: str
    refuses: Callable[[Call, bool], str]
    forward: Callable[[Call, tuple | None], tuple[Tensor, Saved]]
    backward: Callable[[Call, Saved, Tensor, Tensor, bool], tuple[Tensor, ...]]
    draws: bool = False
    quadratic: bool = False


# --------------------------------------------------------------------------------------------- plain


def _plain(call: Call, key: tuple | None) -> tuple[Tensor, Saved]:
    shares = probabilities(call)
    return plain_result(call, shares), (shares,)


def _plain_backward(
    call: Call, saved: Saved, result: Tensor, gradient: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    *found, of_scores = plain_gradients(call, saved[0], gradient)
    if learns:
        assert call.mask is not None
        found.append(bias_gradient(call.mask, of_scores))
    return tuple(found)


PLAIN = Kernel("plain", "", lambda call, learns: "", _plain, _plain_backward, quadratic=True)


# ---------------------------------------------------------------------------------------------- host


def _host_refuses(call: Call, learns: bool) -> str:
    if call.keep is not None:
        return "it has no dropout"
    if learns:
        return "it has no gradient of a mask"
    if call.value.shape[-1] != call.query.shape[-1]:
        return "values have another width than queries"
    if call.query.dtype not in (*FLOATS, torch.float64):
        return f"it does not compute in {call.query.dtype}"
    return ""


def _added(call: Call) -> Tensor | None:
    """The mask as what is added to scores, in the type of the queries."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    hidden = torch.scalar_tensor(-math.inf, dtype=call.query.dtype, device=call.query.device)
    shown = torch.scalar_tensor(0.0, dtype=call.query.dtype, device=call.query.device)
    return torch.where(call.mask, shown, hidden)


def _copied(tensor: Tensor) -> Tensor:
    """Row by row; ``contiguous`` would ask for the device, which need not be there."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else _copied(tensor)


def _host(call: Call, key: tuple | None) -> tuple[Tensor, Saved]:
    rows = [_unit_stride(t) for t in call[:3]]
    mask = _added(call)
    result, sums = private.CPU_ATTENTION(
        *rows, 0.0, call.is_causal, attn_mask=mask, scale=call.scale
    )
    return result, (sums, mask)


def _host_backward(
    call: Call, saved: Saved, result: Tensor, gradient: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    rows = [_unit_stride(t) for t in call[:3]]
    sums, mask = saved
    return private.CPU_ATTENTION_BACKWARD(
        gradient, *rows, result, sums, 0.0, call.is_causal, attn_mask=mask, scale=call.scale
    )


HOST = Kernel("flash_for_cpu", "cpu", _host_refuses, _host, _host_backward)


# ---------------------------------------------------------------------------------------------- CUDA


def _flash_refuses(call: Call, learns: bool) -> str:
    queries, width = call.query.shape[-2:]
    if call.query.dtype not in HALVES:
        return f"it does not compute in {call.query.dtype}"
    if call.mask is not None:
        return "it takes no mask"
    if call.value.shape[-1] != width or width > 256:
        return "heads are of two widths, or wider than 256"
    if call.is_causal and queries != call.key.shape[-2]:
        return "a causal mask that is no square"
    return ""


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """With zeros behind its last dimension, up to a multiple."""
    missing = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, missing)) if missing else _unit_stride(tensor)


def _narrowed(tensor: Tensor, like: Tensor) -> Tensor:
    width = like.shape[-1]
    return tensor if tensor.shape[-1] == width else tensor.narrow(-1, 0, width)


def _flash(call: Call, key: tuple | None) -> tuple[Tensor, Saved]:
    rows = [_padded(t, 8) for t in call[:3]]
    if key is None:
        found = private.FLASH_ATTENTION(
            *rows, call.dropout_p, call.is_causal, False, scale=call.scale
        )
        result, sums, offset, state = found[0], found[1], found[7], found[6]
    else:
        result, sums, state, offset = KEYED(
            "flash", *rows, None, call.dropout_p, call.is_causal, call.scale, *key
        )
    return _narrowed(result, call.value), (result, sums, state, offset)


def _flash_backward(
    call: Call, saved: Saved, result: Tensor, gradient: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    rows = [_padded(t, 8) for t in call[:3]]
    padded, sums, state, offset = saved
    lengths = call.query.shape[-2], call.key.shape[-2]
    found = private.FLASH_ATTENTION_BACKWARD(
        _padded(gradient, 8), *rows, padded, sums, None, None, *lengths, call.dropout_p,
        call.is_causal, state, offset, scale=call.scale,
    )  # fmt: skip
    return tuple(_narrowed(t, like) for t, like in zip(found, call[:3], strict=True))


FLASH = Kernel("flash", "cuda", _flash_refuses, _flash, _flash_backward, draws=True)


def _efficient_refuses(call: Call, learns: bool) -> str:
    if call.query.dtype not in FLOATS:
        return f"it does not compute in {call.query.dtype}"
    return ""


def _aligned(call: Call) -> list[Tensor]:
    """Queries, keys and values as the kernel wants them: all heads, 16 bytes a piece."""
    times = call.query.shape[1] // call.key.shape[1]
    wide = [call.query, *(t if times == 1 else t.repeat_interleave(times, 1) for t in call[1:3])]
    return [_padded(t, 16 // call.query.element_size()) for t in wide]


def _bias(call: Call) -> Tensor | None:
    """The mask, added: rows that begin at a multiple of 8 elements, repeated without a copy."""
    mask = _added(call)
    if mask is None:
        return None
    batch, heads, queries, _ = call.query.shape
    keys = call.key.shape[-2]
    if mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    if mask.stride(-1) != 1 or any(step % 8 for step in mask.stride()[:-1]):
        mask = _padded(mask, 8).narrow(-1, 0, keys) if keys % 8 else _copied(mask)
    return mask.expand(batch, heads, queries, keys)


def _efficient(call: Call, key: tuple | None) -> tuple[Tensor, Saved]:
    rows, bias = _aligned(call), _bias(call)
    how = (call.dropout_p, call.is_causal)
    if key is None:
        found = private.EFFICIENT_ATTENTION(*rows, bias, True, *how, scale=call.scale)
    else:
        found = KEYED("efficient", *rows, bias, *how, call.scale, *key)
    return _narrowed(found[0], call.value), (*found, bias)


def _efficient_backward(
    call: Call, saved: Saved, result: Tensor, gradient: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    padded, sums, seed, offset, bias = saved
    rows = _aligned(call)
    *found, of_bias = private.EFFICIENT_ATTENTION_BACKWARD(
        _padded(gradient, 16 // gradient.element_size()), *rows, bias, padded, sums, seed, offset,
        call.dropout_p, [True, True, True, learns], call.is_causal, scale=call.scale,
    )  # fmt: skip
    groups = call.key.shape[1]
    for i in (1, 2):
        if found[i].shape[1] != groups:
            found[i] = found[i].unflatten(1, (groups, -1)).sum(2)
    grads = [_narrowed(t, like) for t, like in zip(found, call[:3], strict=True)]
    if learns:
        assert call.mask is not None
        grads.append(bias_gradient(call.mask, of_bias))
    return tuple(grads)


EFFICIENT = Kernel(
    "efficient", "cuda", _efficient_refuses, _efficient, _efficient_backward, draws=True
)


# ----------------------------------------------------------------------------------- keyed dropout


@torch.library.custom_op("stepgraph::keyed_attention", mutates_args=(), device_types="cuda")
def keyed_attention(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    seed: Tensor,
    operation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A fused attention whose dropout is a function of the seed, the step and the operation.

    The kernels draw from the device's generator, and take no seed: it is set on the host for the call
    alone, and put back (in a CUDA graph: :mod:`stepgraph.lowering.graphs.draws`). Nothing waits for the
    device.

    Args:
        kernel: ``flash`` or ``efficient``.
        seed: int64, 0-dim, on the host: of this step.
        operation: tells operations, and parts of one that ranks draw, apart.

    Returns:
        the result, the sums of its rows, and the two tensors by which the backward draws the same.
    """
    generator = torch.cuda.default_generators[query.device.index]
    with drawing(generator, (int(seed) + operation) % LIMIT):
        if kernel == "flash":
            found = private.FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)
            return found[0], found[1], found[6], found[7]
        return private.EFFICIENT_ATTENTION(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )


@keyed_attention.register_fake
def _(kernel, query, key, value, bias, dropout_p, is_causal, scale, seed, operation):
    if kernel == "flash":
        found = private.FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)
        return found[0], found[1], found[6], found[7]
    return private.EFFICIENT_ATTENTION(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )


KEYED = torch.ops.stepgraph.keyed_attention.default
