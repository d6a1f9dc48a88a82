"""Attention whose scores and mask are functions of positions (``flex_attention``), as one operator.

It is captured as ``stepgraph::flex_attention`` on every device, its functions as text
(:mod:`stepgraph.operators.scalar_functions`). A device that has torch's kernel keeps it; elsewhere it is
spelt out when a Program is lowered (:mod:`stepgraph.lowering.passes.choose_attention_kernels`).
"""

import ast
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from stepgraph import torch_internals
from stepgraph.operators.attention import all_heads, rows_first
from stepgraph.operators.scalar_functions import (
    POSITIONS,
    function_of,
    is_read_once,
    looked_up_by,
    subscript,
)
from stepgraph.program.metadata import meta
from stepgraph.torch_internals import flex

aten = torch.ops.aten

SCORE = ("score", *POSITIONS)


class Flex(NamedTuple):
    """One call.

    ``query`` is [batch, heads, queries, width], ``key`` [batch, heads or a divisor of them, keys, width],
    ``value`` like it, of any width. ``score_others`` and ``mask_others`` are the tensors that the
    functions ``score`` and ``mask`` look into. ``blocks`` says which blocks of queries and keys meet, as
    torch's block mask has it: pairs of counts and indices, of keys by queries and of queries by keys, each
    twice where blocks that are whole are kept apart. ``sizes`` are lengths of queries and keys, of their
    blocks, and how many fields torch has between; ``options`` are the kernel's.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_others: list[Tensor]
    mask_others: list[Tensor]
    blocks: list[Tensor]
    score: str
    mask: str
    scale: float
    sizes: list[int]
    options: str


# ------------------------------------------------------------------------------------------ meaning


def plain_result(call: Flex) -> tuple[Tensor, Tensor]:
    """Result and sums, in arithmetic; the result is laid out as [batch, queries, heads, width]."""
    query, device = call.query, call.query.device
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value = (all_heads(t, query) for t in call[1:3])
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * call.scale
    places = [torch.arange(n, device=device) for n in scores.shape]
    scores = _everywhere(function_of(call.score, device), 1)(scores, *places, *call.score_others)
    shown = _everywhere(function_of(call.mask, device), 0)(*places, *call.mask_others)
    scores = torch.where(shown, scores.to(wide), -math.inf)
    shares = aten._safe_softmax.default(scores, -1).to(query.dtype)
    return rows_first(shares @ value), torch.logsumexp(scores, -1) / math.log(2)


def _everywhere(function: Callable[..., Tensor], first: int) -> Callable[..., Tensor]:
    """A function of numbers for all rows, heads, queries and keys; ``first`` tensors have them already."""
    tensors = function.__code__.co_argcount - first - len(POSITIONS)  # type: ignore[attr-defined]
    for dim in reversed(range(len(POSITIONS))):
        places = [0 if i == dim else None for i in range(len(POSITIONS))]
        function = torch.vmap(function, in_dims=(*[0] * first, *places, *[None] * tensors))
    return function


def plain_gradients(call: Flex, gradient: Tensor, learned: Sequence[int]) -> list[Tensor]:
    """What torch's derivative of :func:`plain_result` gives; it computes the scores anew."""
    with flex.differentiating():
        rows = [t.detach().requires_grad_() for t in call[:3]]
        others = [t.detach().requires_grad_(i in learned) for i, t in enumerate(call.score_others)]
        result, _ = plain_result(Flex(*rows, others, *call[4:]))
        asked = [*rows, *(others[i] for i in learned)]
        found = torch.autograd.grad(result, asked, gradient, materialize_grads=True)
    return [*map(rows_first, found[:3]), *(t.contiguous() for t in found[3:])]


# -------------------------------------------------------------------------------------- the kernel
#
# Of torch, compiled once for the functions, shapes and options of a call.


def torchs_call(call: Flex) -> flex.Call:
    """As torch's operator takes it."""
    device, blocks = call.query.device, list(call.blocks)
    if len(blocks) == 4:  # whole blocks are not kept apart
        blocks = [*blocks[:2], None, None, *blocks[2:], None, None]
    *sizes, between = call.sizes
    score, shown = (function_of(text, device, subscript) for text in (call.score, call.mask))
    mask = (*sizes[:2], *blocks, *[None] * between, *sizes[2:], shown)
    others = tuple(call.score_others), tuple(call.mask_others)
    options = ast.literal_eval(call.options)
    return flex.Call(*call[:3], score, mask, call.scale, options, others)


_COMPILED: dict[Any, Callable[[list[Tensor]], Sequence[Tensor]]] = {}


def kernel_refuses(call: Flex, learned: Sequence[int]) -> str:
    """Why torch's kernel cannot compute a call and its gradients; empty: it can."""
    if call.query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it does not compute in {call.query.dtype}"
    if min(call.query.shape[-1], call.value.shape[-1]) < 16:
        return "heads are narrower than 16"
    for i in learned:
        if not is_read_once(call.score, f"t{i}", call.score_others[i].dim()):
            return "a learned tensor is not read at one place, a number at a time"
    return ""


def in_kernel(call: Flex, *more: Tensor) -> Sequence[Tensor]:
    """:func:`plain_result` by torch's own operator."""
    return flex.forward(torchs_call(call))


def gradients_in_kernel(call: Flex, *more: Tensor, learned: Sequence[int]) -> Sequence[Tensor]:
    """:func:`plain_gradients` by torch's own operator; ``more`` are result, sums and gradient."""
    torchs = torchs_call(call)
    found = flex.backward(torchs, *more, flex.joint_graph(torchs, learned))
    return [*found[:3], *(found[3 + i] for i in learned)]


def flat(function: Callable, call: Flex) -> Callable[..., Sequence[Tensor]]:
    """A function of a call and more tensors as one of :func:`tensors_of` it and those."""

    def of_tensors(*tensors: Tensor) -> Sequence[Tensor]:
        rows, others, more = _grouped(tensors, [len(x) for x in call[3:6]])  # type: ignore[arg-type]
        return function(Flex(*rows, *others, *call[6:]), *more)

    return of_tensors


def _grouped(tensors: Iterable[Tensor], lengths: Sequence[int]) -> tuple[list, list, list]:
    """Of :func:`tensors_of` a call and more: query, key and value, the lists, and the others."""
    rest = iter(tensors)
    rows, *others = [list(itertools.islice(rest, n)) for n in (3, *lengths)]
    return rows, others, list(rest)


def tensors_of(call: Flex) -> list[Tensor]:
    """All tensors of a call."""
    return [*call[:3], *call.score_others, *call.mask_others, *call.blocks]


def _compiled(function: Callable, known: Any, call: Flex, *more: Tensor) -> Sequence[Tensor]:
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in call[:3]]
    call = Flex(*rows, *call[3:])
    tensors = [*tensors_of(call), *more]
    kinds = ((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    key = (known, *map(len, call[3:6]), repr(call[6:]), *kinds)
    if key not in _COMPILED:
        _COMPILED[key] = flex.compiled(flat(function, call), tensors)
    return _COMPILED[key](tensors)


# --------------------------------------------------------------------------------------- operators


@torch.library.custom_op("stepgraph::flex_attention", mutates_args=())
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_others: list[Tensor],
    mask_others: list[Tensor],
    blocks: list[Tensor],
    score: str,
    mask: str,
    scale: float,
    sizes: list[int],
    options: str,
) -> tuple[Tensor, Tensor]:
    """softmax(score(query key^T scale), where mask) value; arguments as in :class:`Flex`.

    On the host it is computed as it reads; elsewhere by torch's kernel (which nobody here has run: its
    operator was called on hosts, where it is plain).

    Returns:
        [batch, heads, queries, width of value], laid out with heads beside each other; and what the
        backward reads of the sums of each row, [batch, heads, queries], in float32 at least.
    """
    call = Flex(
        query, key, value, score_others, mask_others, blocks, score, mask, scale, sizes, options
    )
    if _is_host(query):
        result, sums = plain_result(call)
    else:
        result, sums = _compiled(in_kernel, None, call)
    return _laid_out(result), sums.contiguous()


@flex_attention.register_fake
def _(query, key, value, *others):
    batch, heads, queries, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    result = query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)
    return result, query.new_empty((batch, heads, queries), dtype=wide)


@torch.library.custom_op("stepgraph::flex_attention_backward", mutates_args=())
def flex_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_others: list[Tensor],
    mask_others: list[Tensor],
    blocks: list[Tensor],
    result: Tensor,
    sums: Tensor,
    score: str,
    mask: str,
    scale: float,
    sizes: list[int],
    options: str,
    learned: list[int],
) -> list[Tensor]:
    """Gradients of query, key, value and of those of ``score_others`` that learn, by their positions.

    ``result`` and ``sums`` are those of the forward.
    """
    call = Flex(
        query, key, value, score_others, mask_others, blocks, score, mask, scale, sizes, options
    )
    if _is_host(query):
        return plain_gradients(call, gradient, learned)
    function = functools.partial(gradients_in_kernel, learned=learned)
    found = _compiled(function, tuple(learned), call, result, sums, _laid_out(gradient))
    return [*map(_laid_out, found[:3]), *(t.contiguous() for t in found[3:])]


@flex_attention_backward.register_fake
def _(gradient, query, key, value, score_others, *others):
    rows = [t.transpose(1, 2).new_empty(t.transpose(1, 2).shape) for t in (query, key, value)]
    learned = (score_others[i] for i in others[-1])
    return [*(t.transpose(1, 2) for t in rows), *(t.new_empty(t.shape) for t in learned)]


def _is_host(tensor: Tensor) -> bool:
    return tensor.device.type == torch_internals.host_device().type


def _laid_out(tensor: Tensor) -> Tensor:
    """Heads beside each other; copied where they are not."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _remember(ctx, inputs, output) -> None:
    call = Flex(*inputs)
    ctx.lengths = [len(x) for x in call[3:6]]
    ctx.save_for_backward(*tensors_of(call), *output)
    ctx.rest = call[6:]


def _differentiate(ctx, gradient, of_sums):
    rows, others, (result, sums) = _grouped(ctx.saved_tensors, ctx.lengths)
    learned = [i for i, asked in enumerate(ctx.needs_input_grad[3]) if asked]
    found = FLEX_BACKWARD(gradient, *rows, *others, result, sums, *ctx.rest, learned)
    of_others = dict(zip(learned, found[3:], strict=True))
    given = [of_others.get(i) for i in range(ctx.lengths[0])]
    return *found[:3], given, *([None] * n for n in ctx.lengths[1:]), *[None] * len(ctx.rest)


flex_attention.register_autograd(_differentiate, setup_context=_remember)

FLEX = torch.ops.stepgraph.flex_attention.default
FLEX_BACKWARD = torch.ops.stepgraph.flex_attention_backward.default
FLEXES = (FLEX, FLEX_BACKWARD)


def call_of(node: fx.Node) -> Flex:
    """The call that an operation is, or is the backward of: of nodes, by its own arguments."""
    if node.target is FLEX:
        return Flex(*node.args)  # type: ignore[arg-type]
    return Flex(*node.args[1:7], *node.args[9:14])  # type: ignore[arg-type]


def is_sums(node: fx.Node) -> bool:
    """Whether a value is the sums of rows: of three dimensions, and yet no activation."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is FLEX and node.args[1] == 1


def values_of(node: fx.Node) -> Flex:
    """:func:`call_of`, of the fake tensors that the nodes stand for."""
    return Flex(*map_arg(tuple(call_of(node)), lambda n: meta(n)["val"]))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- parts


def along(node: fx.Node, dim: int) -> tuple[list[int | None], list[int | None]] | None:
    """How an operation divides along the batch (0) or the heads (1).

    A function counts rows and heads of the whole: a part counts its own, which is right where that number
    only says where a tensor is read, which is divided there then.

    Returns:
        the dimension that divides each tensor argument and each result, None where all have it, or a result
        is a sum over parts; or None: it does not divide so.
    """
    call, values = call_of(node), values_of(node)
    size = values.query.shape[dim]
    if size == 1 or any(t.shape[dim] not in (1, size) for t in values.blocks):
        return None
    others: list[list[int | None]] = []
    for text, tensors in ((call.score, values.score_others), (call.mask, values.mask_others)):
        places = looked_up_by(text, POSITIONS[dim])
        if places is None or any(tensors[int(t[1:])].shape[d] != size for t, d in places.items()):
            return None
        others.append([places.get(f"t{i}") for i in range(len(tensors))])
    rows = [dim if t.shape[dim] != 1 else None for t in values[:3]]
    blocks = [dim if t.shape[dim] != 1 else None for t in values.blocks]
    tensors = [*rows, *others[0], *others[1], *blocks]
    if node.target is FLEX:
        return tensors, [dim, dim]
    learned = [others[0][i] for i in node.args[-1]]  # type: ignore[union-attr]
    return [dim, *tensors, dim, dim], [*rows, *learned]
