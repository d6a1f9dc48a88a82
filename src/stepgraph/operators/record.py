"""What is known of an operator: one record each, whoever asks.

What has no record gets what its schema and tags say, and else what is always right: it is no view, has a
kernel of its own, costs its bytes, and draws if torch says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# How an operator takes part in a fused kernel.
CONSTANT = "constant"  # part of the loop that reads it: no traffic
LOOP = "loop"  # a loop over elements
ROWS = "rows"  # a reduction over the innermost dimension, and what follows over the same rows


@dataclass(frozen=True)
class Operator:
    """What is known of one operator.

    ``fusing``: CONSTANT, LOOP, ROWS, or None: a kernel of its own. ``reduces``: it is a reduction.
    ``elementwise``: an element of the result depends on the same element of the arguments alone.
    ``aliased``: positions of arguments that results may share storage with; None where no schema says.
    ``cost``: the class of its arithmetic in a device's table, empty where bytes decide.
    ``power``: that class depends on the exponent. ``looks_up``: it reads as much of its table as it
    returns. ``copies``: the value of its argument, in another place or type. ``draws``: a generator
    may decide its result. ``shape_argument``: position of the argument that is the result's shape.
    """

    target: Any
    fusing: str | None = None
    reduces: bool = False
    elementwise: bool = False
    aliased: tuple[int, ...] | None = None
    cost: str = ""
    power: bool = False
    looks_up: bool = False
    copies: bool = False
    draws: bool = False
    shape_argument: int | None = None


# Facts of a family of operators: (operators, what differs from what schema and tags say).
Facts = tuple[tuple[Any, ...], dict[str, Any]]


def overloads(*packets: Any) -> tuple[Any, ...]:
    """Every overload of operators."""
    return tuple(getattr(packet, name) for packet in packets for name in packet.overloads())


def derived(target: Any) -> dict[str, Any]:
    """What the schema and the tags of an operator say; of anything else, nothing."""
    tags = getattr(target, "tags", ())
    schema = getattr(target, "_schema", None)
    known: dict[str, Any] = {
        "reduces": torch.Tag.reduction in tags,
        "elementwise": torch.Tag.pointwise in tags,
        "draws": torch.Tag.nondeterministic_seeded in tags,
    }
    if torch.Tag.pointwise in tags:
        known["fusing"] = LOOP
    if schema is not None:
        arguments = enumerate(schema.arguments)
        known["aliased"] = tuple(i for i, a in arguments if a.alias_info is not None)
    return known
