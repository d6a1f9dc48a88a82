"""The numbers of an optimizer's parameter groups (learning rates, betas), as inputs of the programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.capture.optimizer import FunctionalOptimizer, group_numbers, group_settings
from stepgraph.errors import FrozenNumberError
from stepgraph.program import roles


class GroupNumbers:
    """What the optimizer's groups say now, and what the programs were told last."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._numbers: dict[str, float] = {}
        self._settings: list[dict[str, Any]] | None = None

    def update(
        self, functional: FunctionalOptimizer, tensors: Mapping[roles.Input, torch.Tensor]
    ) -> None:
        """Copies numbers that changed into the programs' inputs.

        Raises:
            FrozenNumberError: a number changed that the program holds as a constant.
        """
        settings = [group_settings(group) for group in self.optimizer.param_groups]
        self._settings = self._settings or settings
        if settings != self._settings:
            self._report_settings(settings)
        for index, group in enumerate(self.optimizer.param_groups):
            for name, value in group_numbers(group).items():
                full = f"group{index}.{name}"
                if self._numbers.get(full) == value:
                    continue
                _check_number(functional, index, name, value)
                tensor = tensors.get(roles.Scalar(full))
                if tensor is not None:  # a program that takes it may still come
                    self._numbers[full] = value
                    tensor.fill_(value)

    def _report_settings(self, settings: list[dict[str, Any]]) -> None:
        assert self._settings is not None
        if len(settings) != len(self._settings):
            what = f"there are {len(settings)} parameter groups, there were {len(self._settings)}"
        else:
            what = "; ".join(
                f"{key!r} of parameter group {index} changed from {old.get(key)!r} to {new.get(key)!r}"
                for index, (old, new) in enumerate(zip(self._settings, settings, strict=True))
                for key in {*old, *new}
                if old.get(key) != new.get(key)
            )
        raise FrozenNumberError(
            f"the optimizer changed after the step was compiled: {what}",
            do="set it before the first step, or make a new Engine",
        )


def _check_number(functional: FunctionalOptimizer, group: int, name: str, value: float) -> None:
    for (of_group, _, _), rule in functional.rules.items():
        if of_group != group:
            continue
        burnt = rule.constants.get(name)
        broken = any(c.number == name and not c.holds(value) for c in rule.conditions)
        if broken or (burnt is not None and burnt != value):
            raise FrozenNumberError(
                f"{name!r} of parameter group {group} changed to {value} after the step was "
                "compiled, which took it as fixed",
                why="the compiled update has another form for the new value"
                if broken
                else f"this optimizer needs {name!r} as a plain number",
                do="set it before the first step, or make a new Engine",
            )
