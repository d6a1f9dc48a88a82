"""How each kind of parameter is updated, as data: what an optimizer's step has become."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from stepgraph.capture.whole_tensors import Update, update_in
from stepgraph.operators.updates import ADAM, ADAMW

FIRST_STEP = "first_step"


@dataclass(frozen=True)
class Condition:
    """A fact about a number that the traced step relies on: ``weight_decay != 0`` is True."""

    number: str
    comparison: Callable[[float, float], bool]
    other: float
    outcome: bool

    def holds(self, value: float) -> bool:
        """Whether the fact is still true of ``value``."""
        return bool(self.comparison(value, self.other)) is self.outcome


@dataclass(frozen=True)
class StateSpec:
    """Shape, dtype and starting value of one state. ``fill`` None: the first gradient defines it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None


@dataclass
class UpdateRule:
    """How one kind of parameter is updated.

    ``graph`` takes (parameter, gradient, *states, *numbers) and returns (new parameter, *new states).
    ``numbers`` are those of the parameter group that are inputs (``lr``, ``betas.0``); ``constants``
    had to be burnt in. ``kernel`` is torch's own for the same step, and ``settings`` what of the graph it
    takes besides tensors.
    """

    graph: fx.GraphModule
    states: dict[str, StateSpec]
    numbers: tuple[str, ...]
    conditions: tuple[Condition, ...]
    constants: dict[str, float]
    kernel: str = ""
    settings: tuple[fx.Node, ...] = ()

    @functools.cached_property
    def whole(self) -> Update | None:
        """What it does to whole tensors, where that is one operation."""
        return update_in(self.graph.graph)


@dataclass
class FunctionalOptimizer:
    """All update rules of an optimizer.

    ``group_of`` maps a parameter's name to its group number; ``rules`` is keyed by (group, shape,
    dtype); ``numbers`` are the full names ``group0.lr`` of all inputs with their present values.
    """

    group_of: dict[str, int]
    rules: dict[tuple, UpdateRule] = field(default_factory=dict)

    def rule(self, name: str, tensor: torch.Tensor) -> UpdateRule:
        """The rule of one parameter."""
        return self.rules[self.group_of[name], tuple(tensor.shape), tensor.dtype]

    def with_earlier(self, earlier: FunctionalOptimizer | None) -> FunctionalOptimizer:
        """Also the parameters that an earlier program updates, and this one may not."""
        if earlier is None:
            return self
        group_of = {**earlier.group_of, **self.group_of}
        return FunctionalOptimizer(group_of, {**earlier.rules, **self.rules})


# The settings that torch's fused kernels of Adam take, after the counter of steps.
_OF_ADAM = ("lr", "betas.0", "betas.1", "weight_decay", "eps")


def with_kernel(
    rule: UpdateRule, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> UpdateRule:
    """The rule, with the name of torch's fused kernel where that computes the same step."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)  # and nobody's own
    otherwise = group.get("amsgrad") or group.get("maximize")
    if not is_adam or otherwise or [*rule.states] != ["step", "exp_avg", "exp_avg_sq"]:
        return rule
    given = rule.graph.graph.find_nodes(op="placeholder")
    numbers = dict(zip(rule.numbers, given[2 + len(rule.states) :], strict=True))
    if not {*_OF_ADAM} <= numbers.keys():
        return rule
    step = rule.graph.graph.output_node().args[0][1]  # type: ignore[index]
    settings = (step, *(numbers[name] for name in _OF_ADAM))
    kernel = ADAMW if group.get("decoupled_weight_decay") else ADAM
    return replace(rule, kernel=kernel, settings=settings)
