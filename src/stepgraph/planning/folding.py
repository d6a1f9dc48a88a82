"""Names that repeated layers share, written once: ``model.layers.*.mlp/mul`` for layers ``0-31``.

A name's layer is the first component of its module path that is a number. Names without one stand as
they are. What a plan file says of ten thousand operations so takes a few hundred lines.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

Folded = dict[str, list[str]]
"""Layers (``0-31``, or "" for names without) -> patterns of names."""

_Value = TypeVar("_Value", bound=Hashable)

LARGEST_LAYER = 1_000_000
_LAYER = re.compile(r"(?:^|\.)(0|[1-9][0-9]{0,5})(?=[./])")
_RUN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")


def layer_of(name: str) -> tuple[str, int | None]:
    """``("model.layers.*.mlp/mul", 3)`` for a name in layer 3; ``(name, None)`` for one in no layer."""
    if "*" in name:
        return name, None
    match = _LAYER.search(name)
    slash = name.find("/")
    if match is None or (0 <= slash < match.start(1)):
        return name, None
    return f"{name[: match.start(1)]}*{name[match.end(1) :]}", int(match[1])


def fold(names: Iterable[str]) -> Folded:
    """Names grouped by the layers that they repeat in; sorted."""
    layers: dict[str, list[int]] = {}
    plain: list[str] = []
    for name in names:
        pattern, layer = layer_of(name)
        if layer is None:
            plain.append(name)
        else:
            layers.setdefault(pattern, []).append(layer)
    folded: Folded = {"": sorted(plain)} if plain else {}
    for pattern in sorted(layers):
        folded.setdefault(show_layers(layers[pattern]), []).append(pattern)
    return folded


def fold_by(values: Mapping[str, _Value]) -> dict[_Value, Folded]:
    """Names grouped by their value, then folded."""
    groups: dict[_Value, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return {value: fold(names) for value, names in groups.items()}


def unfold(folded: Mapping[str, list[str]], spend: Callable[[int], None]) -> list[str]:
    """The names that :func:`fold` was given; ``spend`` is told of their number before they are made.

    Raises:
        ValueError: layers that are not understood.
    """
    names: list[str] = []
    for shown, patterns in folded.items():
        runs = _runs(shown)
        spend(len(patterns) * sum(last - first + 1 for first, last in runs))
        spend(len(patterns))
        if not shown:
            names += patterns
            continue
        for pattern in patterns:
            if pattern.count("*") != 1:
                raise ValueError(f"{pattern!r} does not say where the layer's number stands")
            head, _, tail = pattern.partition("*")
            for first, last in runs:
                names += [f"{head}{layer}{tail}" for layer in range(first, last + 1)]
    return names


def show_layers(layers: Iterable[int]) -> str:
    """``0-30,63`` for many numbers."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _runs(shown: str) -> list[tuple[int, int]]:
    """The inverse of :func:`show_layers`, as first and last numbers."""
    runs = []
    for part in shown.split(",") if shown else ():
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"layers {shown[:40]!r} are not understood at {part[:20]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= LARGEST_LAYER:
            raise ValueError(f"layers {part!r} are out of range")
        runs.append((first, last))
    return runs


def seen_from(name: str, layer: int | None) -> str:
    """A name as layer ``layer`` writes it: ``*`` for itself, ``*+1`` and ``*-1`` for its neighbours.

    So what every layer says of itself is the same text.
    """
    pattern, own = layer_of(name)
    if layer is None or own is None or abs(own - layer) > 1:
        return name
    return pattern.replace("*", {0: "*", 1: "*+1", -1: "*-1"}[own - layer], 1)


def as_seen(text: str, layer: int | None) -> str:
    """The inverse of :func:`seen_from`."""
    if layer is None or "*" not in text:
        return text
    for mark, offset in (("*+1", 1), ("*-1", -1), ("*", 0)):
        if mark in text:
            return text.replace(mark, str(layer + offset), 1)
    return text
