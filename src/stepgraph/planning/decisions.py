"""The four decisions as data. Applying them is mechanical; replaying a plan decides nothing again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepgraph.program.layout import Placements


@dataclass(frozen=True)
class OperationPlacement:
    """Placements of one operation: of each tensor argument as it is read, and of each result."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


@dataclass
class PlacementDecision:
    """Where every value of one Program lives.

    Keys are role labels (``Param(lm_head.weight)``) for inputs and outputs, and stable names for
    operations. ``unruled`` lists operators that no rule could place: they are replicated. ``notes`` go
    into the report. ``reasons`` say, by the same names, why a solver chose what it chose: ``chosen`` and
    ``runner_up`` (placements as text, or None), ``cost_ms`` and ``runner_up_cost_ms``. ``optimality_gap``:
    what the solver certified, 0.0 where the decision is optimal; None for a preset. ``held_bytes``: what it
    counted against its memory limit, for whoever sets the next one; it goes into no file. ``batch_dims``:
    of random operations whose numbers belong to rows, the dimension that is the batch, and its blocks.
    """

    preset: str
    inputs: dict[str, Placements] = field(default_factory=dict)
    outputs: dict[str, Placements] = field(default_factory=dict)
    operations: dict[str, OperationPlacement] = field(default_factory=dict)
    unruled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimality_gap: float | None = None
    held_bytes: int = 0
    batch_dims: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class MemoryDecision:
    """Which forward values are not kept for the backward.

    ``recompute`` maps a stable name to the number of the block it is recomputed in; values that are
    not named are saved. ``regather`` names gathered parameters that are gathered again instead.
    """

    policy: str
    recompute: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Normalisation:
    """How a loss is made of sums over the batch, so that micro-batches give the whole batch's result.

    ``totals`` maps the stable name of each partial result to ``sum`` or ``avg``; adding those up over
    micro-batches and evaluating ``tail`` (stable names: operations on them, forward and backward) once
    gives the loss. ``boundary`` is the tail's value that the rest of the backward is proportional to
    (None: the tangent itself). ``gradient_kind`` says whether gradients add up or average over
    micro-batches. ``exact`` False: the loss is the mean over micro-batches, because
    ``reason``. ``numbers``: what sums are multiplied or divided by on their way to the loss (stable names):
    whether one of them is the number of rows is not seen here.
    """

    totals: dict[str, str]
    tail: set[str]
    boundary: str | None
    gradient_kind: str
    exact: bool
    reason: str = ""
    numbers: dict[str, tuple] = field(default_factory=dict)
