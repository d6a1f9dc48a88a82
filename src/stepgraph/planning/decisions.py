"""The four decisions as data. Applying them is mechanical; replaying a plan decides nothing again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from stepgraph.program.layout import Placements

Key = TypeVar("Key")
Value = TypeVar("Value")


class Table(dict[Key, Value]):
    """A dictionary as a value: it reads, compares, copies, pickles and prints like one."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a decision is a value: make a new one, with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = setdefault = pop = popitem = clear = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple:
        return Table, (dict(self),)

    def __copy__(self) -> Table[Key, Value]:
        return self

    def __deepcopy__(self, memo: Any) -> Table[Key, Value]:
        return self

    def __or__(self, other: Mapping) -> Table[Key, Value]:  # type: ignore[override]
        return Table(dict(self) | dict(other))


class Frozen:
    """A frozen dataclass that makes values of its fields: tables of dictionaries, tuples of lists."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, dict) and not isinstance(value, Table):
                object.__setattr__(self, name, Table(value))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))


@dataclass(frozen=True)
class OperationPlacement:
    """Placements of one operation: of each tensor argument as it is read, and of each result."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


@dataclass(frozen=True)
class Reason:
    """Why a solver chose what it chose: placements as text, and what each of the two costs."""

    chosen: str
    cost_ms: float | None = None
    runner_up: str | None = None
    runner_up_cost_ms: float | None = None


@dataclass
class PlacementDraft:
    """A :class:`PlacementDecision` while it is made."""

    preset: str
    inputs: dict[str, Placements] = field(default_factory=dict)
    outputs: dict[str, Placements] = field(default_factory=dict)
    operations: dict[str, OperationPlacement] = field(default_factory=dict)
    unruled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, Reason] = field(default_factory=dict)
    batch_dims: dict[str, tuple[int, int]] = field(default_factory=dict)
    optimality_gap: float | None = None
    held_bytes: int = 0
    views_apart: bool = False

    def decision(self) -> PlacementDecision:
        """What it has come to."""
        return PlacementDecision(**vars(self))


@dataclass(frozen=True)
class PlacementDecision(Frozen):
    """Where every value of one Program lives.

    Keys are role labels (``Param(lm_head.weight)``) for inputs and outputs, and stable names for
    operations.

    Attributes:
        preset: the policy that decided.
        unruled: operators that no rule could place: they are replicated.
        notes: go into the report.
        reasons: by the same names, why a solver chose what it chose.
        batch_dims: of random operations: the dimension that is the batch, and its blocks.
        optimality_gap: what the solver certified, 0.0 where the decision is optimal; None for a preset.
        held_bytes: what the solver counted against its memory limit, for whoever sets the next one.
        views_apart: each reader of a view has one of its own.
    """

    preset: str
    inputs: Mapping[str, Placements] = Table()
    outputs: Mapping[str, Placements] = Table()
    operations: Mapping[str, OperationPlacement] = Table()
    unruled: Mapping[str, str] = Table()
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, Reason] = Table()
    batch_dims: Mapping[str, tuple[int, int]] = Table()
    optimality_gap: float | None = None
    held_bytes: int = 0
    views_apart: bool = False


@dataclass(frozen=True)
class MemoryDecision(Frozen):
    """Which forward values are not kept for the backward.

    ``recompute`` maps a stable name to the number of the block it is recomputed in (-1: it is gathered
    again); values that are not named are saved. ``pieces`` maps products whose results are too wide to be
    whole (logits), by name, to the number of pieces in which they, their loss and its backward are
    computed; None: all are whole. ``reason``: what a search chose, or why there are pieces, and what it
    comes to. ``offload``: names of values that wait for the backward on the host, and labels of optimizer
    states that wait there from one update to the next; None: none does.
    """

    policy: str
    recompute: Mapping[str, int] = Table()
    notes: tuple[str, ...] = ()
    reason: str | None = None
    pieces: Mapping[str, int] | None = None
    offload: tuple[str, ...] | None = None


@dataclass(frozen=True)
class FrontierPoint:
    """One way to run a step: bytes of a rank at the peak, ms of the step, and what blocks keep."""

    peak_bytes: int
    step_ms: float
    keeps: str


@dataclass(frozen=True)
class ScheduleDecision(Frozen):
    """When each collective runs, and when gradients become updates; all in stable names.

    Attributes:
        policy: that decided.
        buckets: collectives of the placed Program that run as one flat one.
        updates: values that the update reads -> the operation behind which it may start with them. None:
            updates stay behind the backward.
        waits: waits -> the operation before which they complete.
    """

    policy: str
    buckets: tuple[tuple[str, ...], ...] = ()
    updates: Mapping[str, str] | None = None
    waits: Mapping[str, str] = Table()


@dataclass(frozen=True)
class LoweringDecision:
    """How a Program executes: the name of a lowering; why not by the one that was asked for."""

    name: str
    reason: str = ""


@dataclass(frozen=True)
class Decisions:
    """The four decisions for one Program of a step; None: not decided yet."""

    placement: PlacementDecision
    memory: MemoryDecision | None = None
    schedule: ScheduleDecision | None = None
    lowering: LoweringDecision | None = None


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
