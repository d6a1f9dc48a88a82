"""What a model looks like now: this is looked at before every call."""

from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Look:
    """Of every module once, in the order of ``model.modules()``.

    Attributes:
        parts: as they are listed; another list where one of them is another.
        parameters: in the order of ``model.parameters()``.
        training: each module's flag.
        forward_hooks: the numbers of each module's hooks around its forward.
        backward_hooks: some module has hooks on its backward.
        structure: which module holds which, under which names: a number, another one for another structure;
            two of one :class:`Watched` can be compared.
    """

    parts: list[nn.Module] = field(compare=False)
    parameters: list[nn.Parameter]
    training: tuple[bool, ...]
    forward_hooks: tuple[tuple[int, ...], ...]
    backward_hooks: bool
    structure: int = field(compare=False)


def look_at(model: nn.Module) -> Look:
    """Looks at every module of a model."""
    return Watched(model).look()


class Watched:
    """A model that is looked at again and again: its parts are looked for when they are others."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[nn.Module] = [model]
        self._below: list[list[int]] = []  # ids of what each part holds
        self._held: list[int] = []
        self._parameters: list[nn.Parameter] = []
        self._structures: dict[tuple, int] = {}
        self._find_parts()

    def look(self) -> Look:
        """How it looks now."""
        parts = self._parts
        if self._below != [[*map(id, part._modules.values())] for part in parts]:
            parts = self._find_parts()
        held = [one for part in parts for one in part._parameters.values()]
        if self._held != [*map(id, held)]:
            self._held = [*map(id, held)]
            self._parameters = [*{id(one): one for one in held if one is not None}.values()]
        forward_hooks = self._no_hooks
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            forward_hooks = tuple(
                (*part._forward_hooks, *part._forward_pre_hooks) for part in parts
            )
        backward_hooks = any(part._backward_hooks or part._backward_pre_hooks for part in parts)
        training = tuple([part.training for part in parts])
        return Look(
            parts, self._parameters, training, forward_hooks, backward_hooks, self._structure
        )

    def _find_parts(self) -> list[nn.Module]:
        self._parts = [*self._parts[0].modules()]
        self._below = [[*map(id, part._modules.values())] for part in self._parts]
        self._no_hooks = ((),) * len(self._parts)
        number = {id(part): i for i, part in enumerate(self._parts)}
        structure = tuple(
            tuple((name, number.get(id(below))) for name, below in part._modules.items())
            for part in self._parts
        )
        self._structure = self._structures.setdefault(structure, len(self._structures))
        return self._parts
