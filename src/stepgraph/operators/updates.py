"""One parameter's update as one operator: element by element, whatever optimizer it is of.

A torch optimizer's step is traced once for each kind of parameter. Its arithmetic on whole tensors becomes
``stepgraph::update``, as a line of text; what depends on counters and numbers alone stays outside, and is
computed once for all parameters. Torch's own fused kernel, where it has one for the optimizer, is named
beside the text: a lowering may call it instead.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph.operators.scalar_functions import function_of
from stepgraph.torch_internals import operators as private

# Torch's own kernels: "" is none.
ADAM, ADAMW = "adam", "adamw"


PIECE = 2**16  # elements that are computed at once: what is made on the way stays in the cache
COPIED = 2**20  # bytes of small gradients that are made ready for torch's kernel at once


@functools.cache
def held_inside(text: str) -> int:
    """How many tensors of the parameter's size an update holds at once, besides what it is given."""
    names: set[str] = set()
    most = 0
    for line in _lines(text):
        most = max(most, len(names) + 1)  # a name that is used again holds its old value meanwhile
        names.add(line.partition(" = ")[0])
    return most


@functools.cache
def operations_in(text: str) -> tuple[Any, ...]:
    """The operators that an update calls."""
    calls = (line.partition(" = ")[2].partition("(")[0] for line in _lines(text))
    return tuple(operator.attrgetter(call)(torch.ops) for call in calls)


def _lines(text: str) -> list[str]:
    return text.partition(": ")[2].split("; ")[:-1]


def computed(tensors: Sequence[Tensor], numbers: Sequence[Tensor], text: str) -> list[Tensor]:
    """The new values, by the arithmetic of the text."""
    run: Callable[..., Any] = function_of(text, tensors[0].device)
    return run(*tensors, *numbers)


@torch.library.custom_op("stepgraph::update", mutates_args=())
def update(
    tensors: Sequence[Tensor],
    numbers: Sequence[Tensor],
    text: str,
    kernel: str,
    settings: Sequence[Tensor],
) -> list[Tensor]:
    """An optimizer's step for one parameter.

    Args:
        tensors: of the parameter's shape: what the text calls ``t0``, ``t1``, ...
        numbers: 0-dim: ``n0``, ``n1``, ...
        text: what is computed: ``def f(t0, t1, n0): v0 = aten.mul.Tensor(t1, n0); ...; return [v3, v0]``.
        kernel: torch's own for the same step; empty: it has none.
        settings: 0-dim: what that takes.

    Returns:
        what the text returns.
    """
    one = tensors[0]
    if one.numel() <= PIECE or not all(tensor.is_contiguous() for tensor in tensors):
        return computed(tensors, numbers, text)
    flat = [tensor.view(-1) for tensor in tensors]
    results: list[Tensor] = []
    for start in range(0, one.numel(), PIECE):
        made = computed([tensor[start : start + PIECE] for tensor in flat], numbers, text)
        results = results or [torch.empty_like(one, dtype=part.dtype) for part in made]
        for result, part in zip(results, made, strict=True):
            result.view(-1)[start : start + PIECE] = part
    return results


@update.register_fake
def _(tensors, numbers, text, kernel, settings):
    return computed(tensors, numbers, text)


def decomposed(tensors, numbers, text, kernel, settings):
    """The operator as what it is made of."""
    return computed(tensors, numbers, text)


UPDATE = torch.ops.stepgraph.update.default


# ------------------------------------------------------------------------------- torch's own kernels


# By hand: what ``custom_op`` makes spends more time in Python than the kernel takes for small tensors.
torch.library.define(
    "stepgraph::fused_adam_",
    "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "Tensor[] settings, bool decoupled, Tensor? factor) -> ()",
)


def fused_adam_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    settings: Sequence[Tensor],
    decoupled: bool,
    factor: Tensor | None,
) -> None:
    """A step of Adam on several parameters by torch's fused kernel, in place.

    Args:
        settings: 0-dim, on the host: the number of the step, lr, two betas, weight decay, eps.
        decoupled: the weight decay is AdamW's.
        factor: 0-dim, what gradients are multiplied with before; None: nothing.
    """
    step, *numbers = settings
    lr, beta1, beta2, weight_decay, eps = (number.item() for number in numbers)
    kernel = private.FUSED_ADAMW if decoupled else private.FUSED_ADAM
    for few in _few_at_a_time(gradients):
        prepared = (g if factor is None else g * factor for g in gradients[few])
        kernel(
            list(parameters[few]),
            [gradient.contiguous() for gradient in prepared],
            list(means[few]),
            list(squares[few]),
            [],
            [step] * len(parameters[few]),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )


def _few_at_a_time(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """What is called at once: small ones together, so that copies of them are small."""
    start = held = 0
    for position, tensor in enumerate(tensors, 1):
        held += tensor.nbytes
        if held > COPIED or position == len(tensors):
            yield slice(start, position)
            start, held = position, 0


torch.library.impl("stepgraph::fused_adam_", "CompositeExplicitAutograd")(fused_adam_)


@torch.library.register_fake("stepgraph::fused_adam_")
def _(parameters, gradients, means, squares, settings, decoupled, factor):
    return None


FUSED_ADAM = torch.ops.stepgraph.fused_adam_.default
