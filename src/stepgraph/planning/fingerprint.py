"""The fingerprint of a model: parameters and buffers by name, shape and type; and how two differ.

It is a table, not a hash: a plan for another model says what is different.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from stepgraph.errors import PlanError, name_a_few
from stepgraph.planning.reading import TypeText

_AT_MOST = 3


@dataclass(frozen=True)
class Fingerprint:
    """What a plan was made for.

    ``parameters`` and ``buffers`` map names to ``float32[4096, 4096]``, or to ``= name`` for a tied
    tensor; global shapes. ``frozen``: parameters that take no gradient.
    """

    parameters: dict[str, TypeText] = field(default_factory=dict)
    buffers: dict[str, TypeText] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Compares a model with this.

        Raises:
            PlanError: says what differs, at most a few names of each kind.
        """
        differences = self.differences(fingerprint_of(model))
        if differences:
            raise PlanError(
                "the plan was made for another model",
                why="; ".join(differences),
                do="make the plan again for this model, or start from a preset",
            )

    def differences(self, other: Fingerprint) -> list[str]:
        """What ``other`` (a model at hand) has otherwise than this (the plan's), in words."""
        shared = self.parameters.keys() & other.parameters.keys()
        rows = [
            *_differences("parameter", self.parameters, other.parameters),
            *_differences("buffer", self.buffers, other.buffers),
            ("frozen only now:", sorted((set(other.frozen) - set(self.frozen)) & shared)),
            ("frozen only in the plan:", sorted((set(self.frozen) - set(other.frozen)) & shared)),
        ]
        return [f"{what} {name_a_few(names, _AT_MOST)}" for what, names in rows if names]


def _differences(
    kind: str, mine: Mapping[str, str], theirs: Mapping[str, str]
) -> list[tuple[str, list[str]]]:
    changed = [
        f"{name} is {theirs[name]}, not {mine[name]}"
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]
    return [
        (f"the model lacks {kind}s of the plan:", [name for name in mine if name not in theirs]),
        (f"the plan does not know {kind}s:", [name for name in theirs if name not in mine]),
        (kind, changed),
    ]


def fingerprint_of(model: nn.Module) -> Fingerprint:
    """The fingerprint of a module; DTensors count by their global shapes, and no value is read."""
    first: dict[int, str] = {}

    def table(tensors) -> dict[str, str]:
        shown = {}
        for name, tensor in tensors:
            known = first.setdefault(id(tensor), name)
            shown[name] = type_of(tensor) if known == name else f"= {known}"
        return shown

    parameters = table(model.named_parameters(remove_duplicate=False))
    buffers = table(model.named_buffers(remove_duplicate=False))
    frozen = tuple(name for name, tensor in model.named_parameters() if not tensor.requires_grad)
    return Fingerprint(parameters, buffers, frozen)


def type_of(tensor) -> str:
    """``bfloat16[16, 4096]``: the type and the (global) shape of a tensor, real or fake."""
    return _show_type(tensor.dtype, tuple(tensor.shape))


@functools.lru_cache(4096)
def _show_type(dtype: object, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
