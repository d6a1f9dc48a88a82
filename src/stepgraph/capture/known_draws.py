"""What random operations give, computed from the generator's words alone: what keyed ones are held to.

Formulas of torch's documentation on real values, apart from the operations that a program is made of.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from stepgraph.program.metadata import meta
from stepgraph.program.randomness import philox

aten = torch.ops.aten
Draw = Callable[..., Any]


class Words:
    """The generator's words for one operation, element by element of its result."""

    def __init__(self, seed: torch.Tensor, name: str, value: Any) -> None:
        self.seed, self.number = seed, zlib.crc32(name.encode())
        self.like = value[0] if isinstance(value, (tuple, list)) else value

    def words(self, shape: Any = None) -> tuple[torch.Tensor, ...]:
        """Four words below 2^32 an element, of a position in the whole tensor."""
        shape = self.like.shape if shape is None else shape
        at = torch.arange(torch.Size(shape).numel()).view(shape)
        seed, step, micro_batch = self.seed.tolist()
        counter = (at, torch.full_like(at, micro_batch << 16), self.number, step)
        whole = [torch.as_tensor(word).expand(at.shape).clone() for word in counter]
        return philox(
            whole, (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF))
        )

    def below(self, probability: float) -> torch.Tensor:
        """True with a probability."""
        return self.words()[0] < round(probability * 2**32)

    def unit(self) -> torch.Tensor:
        """In [0, 1), with the digits that the result's type can tell from 1."""
        digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(self.like.dtype, 32)
        return (self.words()[0] >> 32 - digits).double() * 2.0**-digits

    def exponential(self, shape: Any = None) -> torch.Tensor:
        """Of mean 1."""
        return (-((self.words(shape)[0].double() + 0.5) * 2.0**-32).log()).float()

    def normal(self) -> torch.Tensor:
        """Of mean 0 and deviation 1: Box and Muller's."""
        first, second = ((word.double() + 0.5) * 2.0**-32 for word in self.words()[:2])
        return ((-2 * first.log()).sqrt() * (second * (2 * torch.pi)).cos()).float()

    def whole_number(self, low: int, high: int) -> torch.Tensor:
        """From ``low`` to below ``high``."""
        return self.words()[0] % (high - low) + low


def _dropout(w: Words, x: Any, p: float, train: bool | None = True) -> Any:
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    kept = w.below(1 - p)
    return torch.where(kept, x / (1 - p) if p < 1 else 0 * x, 0 * x), kept


def _choice(w: Words, weights: Any, count: int, replacement: bool = False) -> Any:
    race = weights / w.exponential(weights.shape)
    return race.topk(count).indices


def _leaky(
    w: Words, x: Any, noise: Any, low: float = 1 / 8, high: float = 1 / 3, train: bool = False
):
    if not train:
        return torch.nn.functional.leaky_relu(x, (low + high) / 2), noise
    slope = torch.where(x <= 0, (w.unit() * (high - low) + low).to(x.dtype), torch.ones_like(x))
    return x * slope, slope


KNOWN: Mapping[Any, Draw] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: lambda w, x, p: w.below(p),
    aten.bernoulli.default: lambda w, p: w.unit() < p,
    aten.uniform.default: lambda w, x, low=0.0, high=1.0: w.unit() * (high - low) + low,
    aten.rand.default: lambda w, *_: w.unit(),
    aten.rand_like.default: lambda w, *_: w.unit(),
    aten.randn.default: lambda w, *_: w.normal(),
    aten.randn_like.default: lambda w, *_: w.normal(),
    aten.normal_functional.default: lambda w, x, mean=0.0, std=1.0: w.normal() * std + mean,
    aten.normal.Tensor_float: lambda w, mean, std=1.0: w.normal() * std + mean,
    aten.normal.float_Tensor: lambda w, mean, std: w.normal() * std + mean,
    aten.normal.Tensor_Tensor: lambda w, mean, std: w.normal() * std + mean,
    aten.normal.float_float: lambda w, mean, std, size: w.normal() * std + mean,
    aten.log_normal.default: lambda w, x, mean=1.0, std=2.0: (w.normal() * std + mean).exp(),
    aten.exponential.default: lambda w, x, rate=1.0: w.exponential() / rate,
    aten.randint.default: lambda w, high, size: w.whole_number(0, high),
    aten.randint.low: lambda w, low, high, size: w.whole_number(low, high),
    aten.randint_like.default: lambda w, x, high: w.whole_number(0, high),
    aten.randint_like.low_dtype: lambda w, x, low, high: w.whole_number(low, high),
    aten.randperm.default: lambda w, size: w.words()[0].argsort(),
    aten.multinomial.default: _choice,
    aten.rrelu_with_noise_functional.default: _leaky,
}

_STORAGE = {"dtype", "layout", "device", "pin_memory", "memory_format", "generator"}


def known_draw(seed: torch.Tensor) -> Callable[[fx.Node, tuple, dict[str, Any]], Any]:
    """What a random operation gives under a seed, for an interpreter to put in its place."""

    def draw(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        words = Words(seed, meta(node)["name"], meta(node)["val"])
        plain = {key: value for key, value in kwargs.items() if key not in _STORAGE}
        found = KNOWN[node.target](words, *args, **plain)
        made = meta(node)["val"]
        if isinstance(found, tuple):
            return tuple(x.to(m.dtype) for x, m in zip(found, made, strict=True))
        return found.to(made.dtype)

    return draw
