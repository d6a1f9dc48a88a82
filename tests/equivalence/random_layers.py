"""Layers that random programs are made of; each takes and returns (rows, length, width)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Around(nn.Module):
    """A module between two views, ``(rows, length, width)`` to its own shape and back."""

    def __init__(self, before, module, after):
        super().__init__()
        self.before, self.module, self.after = before, module, after

    def forward(self, x):
        return self.after(self.module(self.before(x)), x)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Pair(nn.Module):
    """Two products with something between them."""

    def __init__(self, width, hidden, bias, between):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=not bias)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class Gated(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """torch's own attention with projections; ``kind``: plain, causal, masked; grouped heads or not.

    ``joint``: queries, keys and values out of one product, as in GPT-2.
    """

    def __init__(self, width, heads, kept, kind, joint=False, dropout=0.0):
        super().__init__()
        self.heads, self.kept, self.kind, self.dropout = heads, kept, kind, dropout
        self.sizes = [width, width // heads * kept, width // heads * kept]
        self.joint = nn.Linear(width, sum(self.sizes)) if joint else None
        if not joint:
            self.q, self.k, self.v = (nn.Linear(width, size, bias=False) for size in self.sizes)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        parts = (
            self.joint(x).split(self.sizes, -1)
            if self.joint is not None
            else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(parts, (self.heads, self.kept, self.kept), strict=True)
        )
        mask = None
        if self.kind == "masked":  # a different one in every row; a position always sees itself
            seen = x.detach()[:, None, None, :, 0] > 0
            own = torch.eye(x.shape[1], dtype=torch.bool)
            mask = seen | own
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.kind == "causal", enable_gqa=self.heads != self.kept,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.o(y.transpose(1, 2).flatten(2))


class Spelled(nn.Module):
    """Attention out of products and a softmax."""

    def __init__(self, width):
        super().__init__()
        self.mix, self.width = nn.Linear(width, 3 * width), width

    def forward(self, x):
        rows, length, _ = x.shape
        heads = self.mix(x).view(rows, length, 3, 2, self.width // 2).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        score = query @ key.transpose(-1, -2) / self.width**0.5
        score = score.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return (torch.softmax(score, -1) @ value).transpose(1, 2).reshape(rows, length, self.width)


class MultiHead(nn.Module):
    def __init__(self, width, batch_first, causal):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=batch_first)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if self.causal else None
        x = x if self.batch_first else x.transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=False, attn_mask=mask)
        return y if self.batch_first else y.transpose(0, 1)


class InPlace(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        y.add_(x).relu_()
        z = y * 2
        z[..., :3].mul_(0.5)
        z[:, 0] += 1
        return z


class Elementwise(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return torch.where(x > 0, x.sigmoid() * self.scale, x.clamp(-1, 1)) + self.shift


class Fold(nn.Module):
    """Views that merge the batch with the positions, and a product on the result."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width * width).view(width, width))

    def forward(self, x):
        rows, length, width = x.shape
        y = (x.reshape(rows * length, width) @ self.weight).view(rows, length, width)
        return y.flip(1) + y.transpose(1, 2).contiguous().view(rows, length, width)


class Flat(nn.Module):
    """A product over positions and width together."""

    def __init__(self, width, length):
        super().__init__()
        self.linear = nn.Linear(width * length, width)

    def forward(self, x):
        return self.linear(x.flatten(1))[:, None].expand_as(x)


class Counter(nn.Module):
    """Writes a buffer that depends on nothing, and is read: to no effect, as micro-batches count it up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x / self.calls.clamp(max=1)


class RunningMean(nn.Module):
    """Writes a buffer that depends on the whole batch."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x - self.mean


class Positions(nn.Module):
    """A table that is looked up by position, and a buffer that is only read."""

    def __init__(self, width, length):
        super().__init__()
        self.table = nn.Embedding(length, width)
        self.register_buffer("ids", torch.arange(length), persistent=False)

    def forward(self, x):
        return x + self.table(self.ids)


def _parts(x):
    first, second = x.chunk(2, -1)
    one, rest = second.split([1, second.shape[-1] - 1], -1)
    return torch.cat([rest.sin(), first, one * 2], -1)


def _top(x):
    values, _ = x.topk(2, -1)
    return x + values.sum(-1, keepdim=True) - x.kthvalue(1, -1, keepdim=True).values


def _norm2d(x):
    return x.unflatten(2, (2, -1)).transpose(1, 2)


def _pairs(kind: str):
    return lambda w, n: Attention(w, 2, 2, kind)


def _turned(module):
    return Around(lambda x: x.transpose(1, 2), module, lambda y, x: y.transpose(1, 2))


# name -> (width, length) -> module
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "pair 5": lambda w, n: Pair(w, 5, True, nn.Tanh()),
    "pair 16": lambda w, n: Pair(w, 16, True, nn.GELU()),
    "pair 12": lambda w, n: Pair(w, 12, False, nn.ReLU()),
    "pair inplace": lambda w, n: Pair(w, 8, True, nn.ReLU(inplace=True)),
    "pair dropout": lambda w, n: Pair(w, 8, True, nn.Dropout(0.3)),
    "pair softmax": lambda w, n: Pair(w, 8, True, nn.Softmax(-1)),
    "gated": lambda w, n: Gated(w, 12),
    "gated 7": lambda w, n: Gated(w, 7),
    "layer norm": lambda w, n: nn.LayerNorm(w),
    "plain layer norm": lambda w, n: nn.LayerNorm((n, w), elementwise_affine=False),
    "rms norm": lambda w, n: nn.RMSNorm(w, eps=1e-6),
    "group norm": lambda w, n: _turned(nn.GroupNorm(2, w)),
    "batch norm": lambda w, n: _turned(nn.BatchNorm1d(w)),
    "plain batch norm": lambda w, n: _turned(
        nn.BatchNorm1d(w, affine=False, track_running_stats=False)
    ),
    "batch norm 2d": lambda w, n: Around(
        _norm2d, nn.BatchNorm2d(2, momentum=0.3), lambda y, x: y.transpose(1, 2).flatten(2)
    ),
    "attention": _pairs("plain"),
    "causal attention": _pairs("causal"),
    "masked attention": _pairs("masked"),
    "grouped attention": lambda w, n: Attention(w, 2, 1, "causal"),
    "joint attention": lambda w, n: Attention(w, 2, 2, "causal", joint=True),
    "attention dropout": lambda w, n: Attention(w, 2, 2, "plain", dropout=0.2),
    "spelled attention": lambda w, n: Spelled(w),
    "multi head": lambda w, n: MultiHead(w, True, False),
    "multi head, length first": lambda w, n: MultiHead(w, False, True),
    "conv 1d": lambda w, n: _turned(nn.Conv1d(w, w, 3, padding=1, groups=2)),
    "strided conv 1d": lambda w, n: Around(
        lambda x: x.transpose(1, 2),
        nn.Conv1d(w, w, 3, padding=1, stride=2, bias=False),
        lambda y, x: x + y.mean(-1)[:, None],
    ),
    "conv 2d": lambda w, n: Around(
        lambda x: x[:, None], nn.Conv2d(1, 3, 3, padding=1), lambda y, x: y.mean(1)
    ),
    "grouped conv 2d": lambda w, n: Around(
        _norm2d,
        nn.Conv2d(2, 4, (1, 3), padding=(0, 1), stride=(1, 1), groups=2),
        lambda y, x: y.unflatten(1, (2, 2)).sum(2).transpose(1, 2).flatten(2),
    ),
    "pool": lambda w, n: Around(
        lambda x: x.transpose(1, 2), nn.AvgPool1d(2, 1), lambda y, x: x + y.amax(-1)[:, None]
    ),
    "in place": lambda w, n: InPlace(w),
    "elementwise": lambda w, n: Elementwise(w),
    "fold": lambda w, n: Fold(w),
    "flat": Flat,
    "counter": lambda w, n: Counter(),
    "running mean": lambda w, n: RunningMean(w),
    "positions": Positions,
    "dropout": lambda w, n: nn.Dropout(0.2),
    "channel dropout": lambda w, n: nn.Dropout1d(0.2),
    "gelu": lambda w, n: nn.GELU(),
    "softmax over length": lambda w, n: Function(lambda x: x.softmax(1)),
    "parts": lambda w, n: Function(_parts),
    "cat rows": lambda w, n: Function(lambda x: torch.cat([x, x.cos()]).view(2, *x.shape).sum(0)),
    "centre": lambda w, n: Function(lambda x: x - x.mean((1, 2), keepdim=True) + x.sum(1)[:, None]),
    "expand": lambda w, n: Function(lambda x: (x[:, :, None].expand(-1, -1, 3, -1) ** 2).mean(2)),
    "roll": lambda w, n: Function(lambda x: x.roll(1, 1) + x.flip(2)),
    "cumulative sum": lambda w, n: Function(lambda x: x.cumsum(1) / n),
    "sort": lambda w, n: Function(lambda x: x.sort(-1).values),
    "top": lambda w, n: Function(_top),
    "einsum": lambda w, n: Function(lambda x: torch.einsum("bij,bkj->bik", x.tanh(), x.tanh()) @ x / w),
    "over rows": lambda w, n: Function(lambda x: x - x.mean(0)),
    "rows in reverse": lambda w, n: Function(lambda x: x + x.flip(0)),
    "sum of rows so far": lambda w, n: Function(lambda x: x + 0.1 * x.cumsum(0)),
}  # fmt: skip
DRAWS = {"dropout", "channel dropout", "pair dropout", "attention dropout"}
