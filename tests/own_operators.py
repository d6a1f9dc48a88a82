"""Operators that are not torch's: a fused RMS norm, a grouped product, a kernel for CUDA alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stepgraph.operators import own

EPSILON = 1e-5


@torch.library.custom_op("tested::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm, and the reciprocal root that its backward needs."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    return x * scale * weight, scale.squeeze(-1).clone()


@norm.register_fake
def _(x, weight):
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@torch.library.custom_op("tested::norm_backward", mutates_args=())
def norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> list[Tensor]:
    """Gradients of both arguments of the norm."""
    scale = scale.unsqueeze(-1)
    weighted = gradient * weight
    along = (weighted * x).mean(-1, keepdim=True)
    of_weight = (gradient * x * scale).flatten(0, -2).sum(0)
    return [weighted * scale - x * along * scale**3, of_weight]


@norm_backward.register_fake
def _(gradient, x, weight, scale):
    return [torch.empty_like(x), torch.empty_like(weight)]


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx, gradient, of_scale):
    return tuple(norm_backward(gradient, *ctx.saved_tensors))


norm.register_autograd(_differentiate, setup_context=_keep)

NORM, NORM_BACKWARD = torch.ops.tested.norm.default, torch.ops.tested.norm_backward.default
NORM_SHARDING = (
    "batch rows _, _ -> batch rows _, batch rows",
    "rows _, _ -> rows _, rows",
)
NORM_BACKWARD_SHARDING = (
    "batch+ rows+ _, batch rows _, _, batch rows -> batch rows _, _",
    "rows+ _, rows _, _, rows -> rows _, _",
)


def norm_cost(x, weight):
    return 4 * x.numel(), 2 * x.nbytes


def norm_backward_cost(gradient, x, weight, scale):
    return 9 * x.numel(), 3 * x.nbytes


@torch.library.custom_op("tested::grouped", mutates_args=())
def grouped(rows: Tensor, weights: Tensor) -> Tensor:
    """[experts, rows, width] by [experts, width, out]."""
    return torch.bmm(rows, weights)


@grouped.register_fake
def _(rows, weights):
    return rows.new_empty((*rows.shape[:2], weights.shape[-1]))


def _keep_all(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


grouped.register_autograd(
    lambda ctx, g: (grouped(g, ctx.saved_tensors[1].mT), grouped(ctx.saved_tensors[0].mT, g)),
    setup_context=_keep_all,
)
GROUPED = torch.ops.tested.grouped.default
GROUPED_SHARDING = "experts rows width+, experts width out -> experts rows out"


@torch.library.custom_op("tested::elsewhere", mutates_args=(), device_types="cuda")
def elsewhere(x: Tensor, by: float) -> Tensor:
    """A kernel for a device that is not here; no fake implementation."""
    raise AssertionError("there is no such device")


def elsewhere_on_host(x, by):
    return x.sin() * by


elsewhere.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.by, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "by", inputs[1]),
    ),
)
ELSEWHERE = torch.ops.tested.elsewhere.default


class FusedNorm(nn.Module):
    def __init__(self, width: int, fused: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.fused = fused

    def forward(self, x):
        if self.fused:
            return norm(x, self.weight)[0]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


class Layer(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.norm = FusedNorm(width, fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Normed(nn.Module):
    """Layers of a norm, one operator or plain ones, and two products, over [batch, rows, width]."""

    def __init__(self, fused: bool = True, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, fused) for _ in range(layers))
        self.last = FusedNorm(width, fused)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (self.last(x) - y).square().mean()


class Experts(nn.Module):
    """A pair of grouped products."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)

    def forward(self, x, y):
        """Every row of [rows, width] goes to all experts."""
        rows = x.expand(len(self.up), *x.shape)
        found = grouped(torch.tanh(grouped(rows, self.up)), self.down)
        return (found.sum(0) - y).square().mean()


def rows_of(*shape: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=random), torch.randn(*shape, generator=random)


@contextlib.contextmanager
def registered(**operators: dict) -> Iterator[None]:
    """Registers operators of this file by their names, for a while."""
    from stepgraph import register_operator

    before = dict(own.REGISTERED)
    try:
        for name, facts in operators.items():
            register_operator(getattr(torch.ops.tested, name).default, **facts)
        yield
    finally:
        own.REGISTERED.clear()
        own.REGISTERED.update(before)


def registered_norm():
    """The norm and its backward, with all there is to say."""
    return registered(
        norm={"sharding": NORM_SHARDING, "cost": norm_cost, "saves": ["x", "weight"]},
        norm_backward={"sharding": NORM_BACKWARD_SHARDING, "cost": norm_backward_cost},
    )
