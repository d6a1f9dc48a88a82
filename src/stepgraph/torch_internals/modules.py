"""What a model looks like now, in one walk without names: this is looked at before every call."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Look:
    """Of every module once, in the order of ``model.modules()``.

    Attributes:
        parameters: in the order of ``model.parameters()``.
        training: each module's flag.
        forward_hooks: the numbers of each module's hooks around its forward.
        backward_hooks: some module has hooks on its backward.
    """

    parameters: list[nn.Parameter]
    training: tuple[bool, ...]
    forward_hooks: tuple[tuple[int, ...], ...]
    backward_hooks: bool


def look_at(model: nn.Module) -> Look:
    """Looks at every module of a model."""
    parts: dict[nn.Module, None] = {}
    parameters: dict[nn.Parameter, None] = {}
    training, forward_hooks, backward_hooks = [], [], False
    left: list[nn.Module] = [model]
    while left:
        part = left.pop()
        if part in parts:
            continue
        parts[part] = None
        training.append(part.training)
        forward_hooks.append((*part._forward_hooks, *part._forward_pre_hooks))
        backward_hooks |= bool(part._backward_hooks or part._backward_pre_hooks)
        for parameter in part._parameters.values():
            if parameter is not None:
                parameters[parameter] = None
        if part._modules:
            left += [below for below in reversed(part._modules.values()) if below is not None]
    return Look(list(parameters), tuple(training), tuple(forward_hooks), backward_hooks)
