"""Random operations read a generator that has no state.

One entry an operator says how its result is made of bits, normals or exponentials
(:mod:`stepgraph.program.randomness`); one without an entry is a clear error, never a mask that differs
in silence.
"""

import operator
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.capture.known_draws import known_draw
from stepgraph.errors import RandomOperationError
from stepgraph.operators.draws import is_random
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import BITS, EXPONENTIAL, NORMAL, RANDOM
from stepgraph.program.record import DISTRIBUTION, Results, Values, program_pass

aten = torch.ops.aten


def _expected(values: Values, before: Program, after: Program) -> Results:
    """The generator's known answers, in the place of each random operation."""
    drawn = [node for node in before.operations() if is_random(node)]
    if not drawn:
        return values.execute(before)
    draw = known_draw(values.given(after)[roles.Seed()])
    return values.execute(before, {meta(node)["name"]: draw for node in drawn})


@program_pass(
    reads="operators tagged random",
    writes="the input ``Seed``; ``random`` and arithmetic in their place",
    preserves=DISTRIBUTION,
    reference=_expected,
)
def key_random_operations(program: Program) -> Program:
    """Every random operation becomes a function of the seed, the step and its own name.

    Raises:
        RandomOperationError: one that has no entry, or its own generator; names it and its line.
    """
    found = [node for node in program.operations() if is_random(node)]
    if not found:
        return program
    seed = _seed_input(program, found[0])
    taken: set[int] = set()
    for node in found:
        draw = _Draw(program, node, seed, _number_of(node, taken))
        _check(node)
        results = TABLE[node.target](draw, *node.args, **_plain(node.kwargs))
        _replace(node, results)
    return program.finish()


class _Draw:
    """Emits what one random operation is replaced by, before it."""

    def __init__(self, program: Program, node: fx.Node, seed: fx.Node, operation: int) -> None:
        self.emit = Builder(program, meta(node)["phase"], node)
        self.emit.module = meta(node)["module"]
        self.node, self.seed, self.operation = node, seed, operation
        value = meta(node)["val"]
        self.value: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value

    def numbers(self, kind: str, sizes: Any = None) -> fx.Node:
        """Raw numbers of a kind, by default in the shape of the result."""
        shape = list(self.value.shape if sizes is None else sizes)
        none = [0] * len(shape)
        return self.emit(RANDOM, self.seed, kind, self.operation, shape, list(shape), none, [], "")

    def cast(self, node: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        """In the dtype of the result."""
        return self.emit.cast(node, dtype or self.value.dtype)

    def uniform(self) -> fx.Node:
        """In [0, 1), in the result's precision: as many digits as it can tell from 1."""
        dtype = self.value.dtype if self.value.dtype.is_floating_point else torch.float32
        digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(dtype, 32)
        bits = self.emit(aten.__rshift__.Scalar, self.numbers(BITS), 32 - digits)
        return self.emit(aten.mul.Scalar, self.cast(bits, dtype), 2.0**-digits)

    def happens(self, probability: float) -> fx.Node:
        """True with a probability; bool."""
        return self.emit(aten.lt.Scalar, self.numbers(BITS), round(probability * 2**32))

    def scaled(self, numbers: fx.Node, scale: Any, shift: Any) -> fx.Node:
        """``numbers * scale + shift``; either may be a number or a tensor."""
        for op, by, neutral in ((aten.mul, scale, 1), (aten.add, shift, 0)):
            if isinstance(by, fx.Node):
                numbers = self.emit(op.Tensor, numbers, by)
            elif by != neutral:
                numbers = self.emit(op.Scalar, numbers, by)
        return self.cast(numbers)


Made = fx.Node | tuple[fx.Node, ...]


def _dropout(draw: _Draw, x: fx.Node, p: float, train: bool | None = True) -> Made:
    if train is False:
        ones = draw.emit(aten.ones_like.default, x, dtype=torch.bool)
        return x, ones
    mask = draw.happens(1.0 - p)
    kept = draw.emit(aten.mul.Tensor, x, draw.cast(mask))
    return draw.emit(aten.mul.Scalar, kept, 1.0 / (1.0 - p) if p < 1.0 else 0.0), mask


def _bernoulli_p(draw: _Draw, x: fx.Node, p: float) -> Made:
    return draw.cast(draw.happens(p))


def _bernoulli(draw: _Draw, probabilities: fx.Node) -> Made:
    return draw.cast(draw.emit(aten.lt.Tensor, draw.uniform(), probabilities))


def _uniform(draw: _Draw, x: Any, low: float = 0.0, high: float = 1.0) -> Made:
    return draw.scaled(draw.uniform(), high - low, low)


def _rand(draw: _Draw, *shape: Any) -> Made:
    return draw.uniform()


def _randn(draw: _Draw, *shape: Any) -> Made:
    return draw.cast(draw.numbers(NORMAL))


def _normal(draw: _Draw, mean: Any = 0.0, std: Any = 1.0) -> Made:
    return draw.scaled(draw.numbers(NORMAL), std, mean)


def _normal_like(draw: _Draw, x: fx.Node, mean: float = 0.0, std: float = 1.0) -> Made:
    return _normal(draw, mean, std)


def _log_normal(draw: _Draw, x: fx.Node, mean: float = 1.0, std: float = 2.0) -> Made:
    return draw.emit(aten.exp.default, _normal(draw, mean, std))


def _exponential(draw: _Draw, x: fx.Node, rate: float = 1.0) -> Made:
    return draw.scaled(draw.numbers(EXPONENTIAL), 1.0 / rate, 0.0)


def _integers(draw: _Draw, low: int, high: int) -> Made:
    within = draw.emit(aten.remainder.Scalar, draw.numbers(BITS), high - low)
    return draw.scaled(within, 1, low)


def _permutation(draw: _Draw, size: int) -> Made:
    return draw.cast(
        draw.emit(operator.getitem, draw.emit(aten.sort.default, draw.numbers(BITS)), 1)
    )


def _choice(draw: _Draw, weights: fx.Node, count: int, replacement: bool = False) -> Made:
    """The largest of weight / exponential is a draw by weight; the next ones, without it."""
    if replacement and count > 1:
        raise _error(draw.node, "several draws with replacement have no keyed version")
    race = draw.numbers(EXPONENTIAL, meta(weights)["val"].shape)
    race = draw.emit(aten.div.Tensor, weights, race)
    if count == 1:
        return draw.emit(aten.argmax.default, race, -1, True)
    return draw.emit(operator.getitem, draw.emit(aten.topk.default, race, count), 1)


def _leaky(
    draw: _Draw,
    x: fx.Node,
    noise: Any,
    low: float = 1 / 8,
    high: float = 1 / 3,
    train: bool = False,
) -> Made:
    if not train:
        return draw.emit(aten.leaky_relu.default, x, (low + high) / 2), noise
    slope = draw.scaled(draw.uniform(), high - low, low)
    one = draw.emit(aten.ones_like.default, x)
    slope = draw.emit(aten.where.self, draw.emit(aten.le.Scalar, x, 0), slope, one)
    return draw.emit(aten.mul.Tensor, x, slope), slope


TABLE: dict[Any, Callable[..., Made]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.default: _bernoulli,
    aten.uniform.default: _uniform,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.normal_functional.default: _normal_like,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: lambda draw, mean, std, size: _normal(draw, mean, std),
    aten.log_normal.default: _log_normal,
    aten.exponential.default: _exponential,
    aten.randint.default: lambda draw, high, size: _integers(draw, 0, high),
    aten.randint.low: lambda draw, low, high, size: _integers(draw, low, high),
    aten.randint_like.default: lambda draw, x, high: _integers(draw, 0, high),
    aten.randint_like.low_dtype: lambda draw, x, low, high: _integers(draw, low, high),
    aten.randperm.default: _permutation,
    aten.multinomial.default: _choice,
    aten.rrelu_with_noise_functional.default: _leaky,
}


def _check(node: fx.Node) -> None:
    if node.target not in TABLE:
        raise _error(node, "it has no keyed version, so it would differ from mesh to mesh")
    if node.kwargs.get("generator") is not None:
        raise _error(node, "it draws from a generator of its own, which a program cannot advance")


def _error(node: fx.Node, why: str) -> RandomOperationError:
    return RandomOperationError(
        f"random operation {node.target} in the training step",
        where=": ".join(filter(None, (meta(node)["name"], meta(node).get("source")))),
        why=why,
        do="draw with torch.rand, randn, randint, bernoulli or dropout, or pass the numbers in the batch",
    )


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that matter: dtype and device are read off the result."""
    about_storage = {"dtype", "layout", "device", "pin_memory", "memory_format", "generator"}
    return {key: value for key, value in kwargs.items() if key not in about_storage}


def _number_of(node: fx.Node, taken: set[int]) -> int:
    """A number made of the stable name, so that another operation's coming or going changes nothing."""
    number = zlib.crc32(meta(node)["name"].encode())
    while number in taken:
        number = (number + 1) % 2**32
    taken.add(number)
    return number


def _seed_input(program: Program, node: fx.Node) -> fx.Node:
    value = meta(node)["val"]
    device = (value[0] if isinstance(value, (tuple, list)) else value).device
    emit = Builder(program, meta(node)["phase"], node)
    return emit.input(roles.Seed(), (3,), torch.int64, device)


def _replace(node: fx.Node, results: Made) -> None:
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
        return
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
