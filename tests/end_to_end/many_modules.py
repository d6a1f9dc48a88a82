"""Small modules and losses of all sorts: what plain torch offers, one table entry each.

Each entry is a function without arguments that makes (module, input, loss): ``loss(module, input)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations as P

Made = tuple[nn.Module, Tensor, Callable[[nn.Module, Any], Tensor]]
MODULES: dict[str, Callable[[], Made]] = {}


class _With(nn.Module):
    """``run(x, *modules)``."""

    def __init__(self, run: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.parts)


def _square(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def _add(name: str, shape: tuple, make: Callable[[], nn.Module], loss: Callable = _square) -> None:
    def entry() -> Made:
        torch.manual_seed(0)
        return make(), torch.randn(shape), loss

    MODULES[name] = entry


def _run(name: str, shape: tuple, run: Callable, *modules: Callable[[], nn.Module]) -> None:
    """An entry of a function of the input and of modules; one linear layer by default."""
    made = modules or (lambda: nn.Linear(shape[-1], 8),)
    _add(name, shape, lambda: _With(run, *(module() for module in made)))


def _loss(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """An entry of a loss of (result, input)."""
    _add(name, (4, 8), lambda: nn.Linear(8, 8), lambda module, x: loss(module(x), x))


def _rows(count: int) -> Tensor:
    """Another weight for each row: so that rows out of order are seen."""
    return torch.arange(float(count))[:, None]


def _words(x: Tensor) -> Tensor:
    return (x.abs() * 10).long().clamp(max=19)


S = nn.Sequential

# Recurrent, attention.
_run("lstm", (4, 6, 16), lambda x, a, b: b(a(x)[0]),
     lambda: nn.LSTM(16, 24, 2, batch_first=True), lambda: nn.Linear(24, 8))  # fmt: skip
_run("gru", (4, 6, 16), lambda x, a, b: b(a(x)[0]),
     lambda: nn.GRU(16, 24, batch_first=True), lambda: nn.Linear(24, 8))  # fmt: skip
_run("lstm both ways", (4, 6, 16), lambda x, a, b: b(a(x)[0]),
     lambda: nn.LSTM(16, 12, batch_first=True, bidirectional=True), lambda: nn.Linear(24, 8))  # fmt: skip
_add("encoder", (4, 6, 32), lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2))  # fmt: skip
_add("encoder, norm first", (4, 6, 32), lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True), 2,
    enable_nested_tensor=False))  # fmt: skip
_run("attention", (4, 6, 32), lambda x, a: a(x, x, x)[0],
     lambda: nn.MultiheadAttention(32, 4, batch_first=True))  # fmt: skip
_run("attention weights", (4, 6, 32), lambda x, a: a(x, x, x, need_weights=True)[1],
     lambda: nn.MultiheadAttention(32, 4, batch_first=True))  # fmt: skip

# Convolutions, pooling, norms, images.
_add("conv 1d", (4, 4, 16), lambda: S(
    nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.GELU(), nn.Conv1d(8, 4, 3, groups=2)))  # fmt: skip
_add("conv 3d", (4, 2, 6, 6, 6), lambda: S(
    nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2)))  # fmt: skip
_add("conv transposed", (4, 3, 16, 16), lambda: S(
    nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()))  # fmt: skip
_add("pixel shuffle", (4, 3, 8, 8), lambda: S(
    nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.AdaptiveAvgPool2d(3)))  # fmt: skip
_add("upsample", (4, 3, 8, 8), lambda: S(
    nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 2, 3),
    nn.Upsample(size=(7, 5), mode="nearest")))  # fmt: skip
_add("instance norm", (4, 3, 8, 8), lambda: S(
    nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.SiLU()))  # fmt: skip
_add("instance norm, running", (4, 3, 8, 8), lambda: S(
    nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)))  # fmt: skip
_add("batch norm without weights", (8, 8), lambda: S(
    nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False),
    nn.BatchNorm1d(8, track_running_stats=False)))  # fmt: skip
_add("pools", (4, 3, 8, 8), lambda: S(
    nn.Conv2d(3, 6, 3), nn.LocalResponseNorm(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2)))  # fmt: skip
_add("reflected", (4, 3, 8, 8), lambda: S(
    nn.Conv2d(3, 6, 3, padding_mode="reflect", padding=1), nn.MaxPool2d(3, 2, 1), nn.Hardswish(),
    nn.Flatten(), nn.Linear(96, 4)))  # fmt: skip
_run("channels last", (4, 3, 8, 8), lambda x, c, n, a: a(n(c(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
     lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3), lambda: nn.LayerNorm(6),
     lambda: nn.Linear(6, 3))  # fmt: skip
_run(
    "unfold", (4, 3, 8, 8), lambda x, a: a(F.unfold(x, 3).transpose(1, 2)), lambda: nn.Linear(27, 8)
)
_run("unfold a dimension", (4, 12), lambda x, a: a(x.unfold(1, 4, 2)), lambda: nn.Linear(4, 8))
_run("grid sample", (4, 3, 8, 8), lambda x, a: F.grid_sample(
    x, torch.tanh(a(x.flatten(2))).view(4, 3, 8, 8)[:, :2].permute(0, 2, 3, 1), align_corners=False),
    lambda: nn.Linear(64, 64))  # fmt: skip

# Parametrizations, shapes that divide by nothing, tied weights.
_add("weight norm", (4, 16), lambda: S(
    P.weight_norm(nn.Linear(16, 16)), nn.Tanh(), P.spectral_norm(nn.Linear(16, 8))))  # fmt: skip
_add("orthogonal", (4, 16), lambda: S(P.orthogonal(nn.Linear(16, 16)), nn.Tanh()))
_run("bilinear", (4, 8), lambda x, a: a(x, x), lambda: nn.Bilinear(8, 8, 4))
_add("odd", (4, 3, 7), lambda: S(
    nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5), nn.RMSNorm(5)))  # fmt: skip
_add("tiny", (4, 3), lambda: S(nn.Linear(3, 1), nn.Linear(1, 1)))
_add("one number", (4, 3), nn.PReLU)
_run("tied", (4, 8), lambda x, a: F.linear(a(_words(x)), a.weight), lambda: nn.Embedding(20, 8))
_run("embedding bag", (4, 8), lambda x, a: a(_words(x)), lambda: nn.EmbeddingBag(20, 8))
_run("embedding, padded", (4, 8), lambda x, a, b: b(a(_words(x))),
     lambda: nn.Embedding(20, 8, padding_idx=0), lambda: nn.Linear(8, 4))  # fmt: skip
_add("gated", (4, 8), lambda: S(
    nn.Linear(8, 16), nn.GLU(), nn.Softmax(dim=0), nn.Linear(8, 3), nn.LogSoftmax(dim=1)))  # fmt: skip

# What mixes the rows of a batch.
_run("softmax of rows", (8, 8), lambda x, a: a(x).softmax(0))
_run("cumulative sum of rows", (8, 8), lambda x, a: a(x).cumsum(0))
_run("sorted rows", (8, 8), lambda x, a: a(x).sort(0)[0] * _rows(8))
_run("top k", (8, 8), lambda x, a: a(x).topk(3, -1)[0])
_run("variance", (8, 8), lambda x, a: a(x).var(0) + a(x).std())
_run("median", (8, 8), lambda x, a: a(x).median(0)[0])
_run("log sum exp", (8, 8), lambda x, a: a(x).logsumexp(0))
_run("norms", (8, 8), lambda x, a: a(x).norm(dim=0) + a(x).norm())
_run("product", (8, 8), lambda x, a: a(x).prod(0))
_run("maxima", (8, 8), lambda x, a: a(x).amax(0) + a(x).max())
_run("flip and roll", (8, 8), lambda x, a: a(x).flip(0).roll(1, 0) * _rows(8))
_run("pairs", (8, 8), lambda x, a: torch.cdist(a(x), a(x)))
_run("reordered rows", (4, 8), lambda x, a: a(x)[torch.tensor([3, 2, 1, 0])] * _rows(4))
_run("first and last row", (4, 8), lambda x, a: a(x)[0] + a(x)[-1])
_run("halves", (4, 8), lambda x, a: torch.cat([a(x[:2]), a(x[2:]) * 2]))
_run("chunks", (4, 8), lambda x, a: sum(c * (i + 1) for i, c in enumerate(a(x).chunk(4, 0))))
_run("stacked", (4, 8), lambda x, a: torch.stack([a(x), x], 0).transpose(0, 1).reshape(4, -1))
_run("flattened and cut anew", (4, 8), lambda x, a: a(x).reshape(-1).view(2, -1) * _rows(2))
_run("views", (4, 3, 8),
     lambda x, a: a(x.view(-1, 8)).view(4, 3, 8).permute(1, 0, 2).reshape(12, 8).cumsum(0))  # fmt: skip
_run("expanded", (4, 8), lambda x, a: a.weight.unsqueeze(0).expand(4, -1, -1) @ x.unsqueeze(-1))
_run("repeated", (4, 8), lambda x, a: a(x.repeat_interleave(3, 0)).view(4, 3, 8).mean(1))
_run("einsum", (4, 5, 8), lambda x, a: torch.einsum("bij,bkj->bik", a(x), x))

# Indices, transforms, linear algebra.
_run("scatter", (4, 8), lambda x, a: torch.zeros(4, 5).scatter_add(1, (x > 0).long(), a(x)))
_run("index add", (8, 8), lambda x, a: torch.zeros(3, 8).index_add(0, torch.arange(8) % 3, a(x)))
_run("gather", (4, 8), lambda x, a: a(x).gather(1, x.argsort(1)))
_run("fourier", (8, 8), lambda x, a: torch.fft.rfft(a(x), dim=1).abs())
_run("filter", (8, 8), lambda x, a: torch.fft.irfft(
    torch.fft.rfft(x, dim=1) * torch.view_as_complex(a.weight.view(1, 5, 2).contiguous()), dim=1),
    lambda: nn.Linear(10, 1, bias=False))  # fmt: skip
_run("complex", (4, 8), lambda x, a: torch.polar(a(x).abs() + 1, x).real)
_run("determinant", (4, 8, 8), lambda x, a: torch.linalg.det(a(x) + torch.eye(8)))
_run("solve", (4, 8, 8), lambda x, a: torch.linalg.solve(a(x) + 5 * torch.eye(8), x))
_run("singular values", (4, 8), lambda x, a: torch.linalg.svdvals(a.weight).sum() * a(x))

# Losses.
_loss("sum", lambda y, x: y.square().sum())
_loss("huber", lambda y, x: F.huber_loss(y, x) + F.smooth_l1_loss(y, x))
_loss("divergence", lambda y, x: F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean"))
_loss("triplet", lambda y, x: F.triplet_margin_loss(y, x, y.flip(1)))
_loss("cosine", lambda y, x: F.cosine_embedding_loss(y, x, torch.ones(4)))
_loss("mean of a mask", lambda y, x: y.masked_fill(x > 0, 0.0).sum() / (x > 0).sum())
_add("decay in the loss", (4, 8), lambda: S(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
     lambda m, x: m(x).mean() + sum(p.square().sum() for p in m.parameters()))  # fmt: skip
