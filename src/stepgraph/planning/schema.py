"""What stands in a plan file, version 3, as types: msgspec checks a file against them.

Names are folded over layers, placements are texts: :mod:`stepgraph.planning.from_json` reads those.
"""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta

from stepgraph.planning.placements import MOST_DIMS
from stepgraph.planning.reading import (
    LARGEST_INTEGER,
    AnyNumber,
    Count,
    Number,
    Strict,
    Text,
    TypeText,
)

VERSION = 3
MOST_RANKS = 2**20
DTYPES = {_name: getattr(torch, _name) for _name in ("bfloat16", "float16", "float32", "float64")}

Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
Folded = dict[Text, list[Text]]
"""Layers -> patterns of names; see :mod:`stepgraph.planning.folding`."""
Groups = dict[Text, Folded]
"""What is said -> the names of which it is said."""


class PrecisionFile(Strict, frozen=True):
    """Names of types."""

    compute: Text | None = None
    reduce: Text | None = None

    def __post_init__(self) -> None:
        for name in (self.compute, self.reduce):
            if name is not None and name not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"{name[:40]!r} is no floating-point type; known: {known}")


class StepFile(Strict, frozen=True):
    """:class:`stepgraph.planning.request.StepSettings`."""

    micro_batches: Positive
    clip: bool
    precision: PrecisionFile
    seed: Annotated[int, Meta(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)]
    optimizer: Text | None = None


class RequestFile(Strict, frozen=True):
    """:class:`stepgraph.planning.request.Request`."""

    placement: Text
    mesh: Annotated[
        list[tuple[Text, Annotated[int, Meta(ge=1, le=MOST_RANKS)]]],
        Meta(min_length=1, max_length=8),
    ]
    memory: Text
    schedule: Text
    lowering: Text
    step: StepFile
    device: Text
    batch: dict[Text, TypeText]
    constraints: dict[Text, Text]
    memory_budget: Positive | None = None


class PlacementFile(Strict, frozen=True):
    """:class:`stepgraph.planning.decisions.PlacementDecision`."""

    preset: Text
    inputs: Groups
    outputs: Groups
    operations: Groups
    unruled: dict[Text, Text]
    notes: list[Text]
    reasons: list[tuple[Text, AnyNumber | None, Text | None, AnyNumber | None, Folded]]
    batch_dims: dict[Text, tuple[Annotated[int, Meta(ge=0, le=MOST_DIMS)], Positive]]
    held_bytes: Count
    views_apart: bool
    optimality_gap: Number | None = None


class MemoryFile(Strict, frozen=True):
    """:class:`stepgraph.planning.decisions.MemoryDecision`; ``{"0:2 1:3": [patterns]}`` recomputes."""

    policy: Text
    recompute: dict[Text, list[Text]]
    notes: list[Text]


class ScheduleFile(Strict, frozen=True):
    """:class:`stepgraph.planning.decisions.ScheduleDecision`."""

    policy: Text
    buckets: list[list[Text]]
    waits: Groups
    updates: Groups | None = None


class LoweringFile(Strict, frozen=True):
    """:class:`stepgraph.planning.decisions.LoweringDecision`."""

    name: Text
    reason: Text


class DecisionsFile(Strict, frozen=True):
    """:class:`stepgraph.planning.decisions.Decisions`."""

    placement: PlacementFile
    memory: MemoryFile | None = None
    schedule: ScheduleFile | None = None
    lowering: LoweringFile | None = None


class FingerprintFile(Strict, frozen=True):
    """:class:`stepgraph.planning.fingerprint.Fingerprint`."""

    parameters: dict[Text, TypeText]
    buffers: dict[Text, TypeText]
    frozen: list[Text]


class Volume(Strict, frozen=True):
    """How much is moved."""

    count: Count
    bytes: Count


class PredictionFile(Strict, frozen=True):
    """:class:`stepgraph.cost.predict.Prediction`; tuples as keys are ``"backward/all_gather"``."""

    device: Text
    step_ms: Number
    compute_ms: Number
    communication_ms: Number
    exposed_ms: Number
    mfu: Number
    peak_bytes: Count
    forward_peak_bytes: Count
    backward_peak_bytes: Count
    bytes_by_category: dict[Text, Count]
    collectives: dict[Text, Volume]
    collectives_by_dim: dict[Text, Volume]
    largest: list[tuple[Text, Number]]
    error: Text
    optimality_gap: Number | None = None


MovesRow = tuple[Text, Text, Text, Count, Count]
ReadsRow = Annotated[list[Text | Count], Meta(min_length=2)]  # placement, count, first readers
FactsRow = tuple[TypeText, list[ReadsRow], list[MovesRow], Folded]


class PlanFile(Strict, frozen=True):
    """A plan file."""

    version: int
    request: RequestFile
    notes: list[Text]
    decisions: dict[Text, DecisionsFile]
    values: dict[Text, list[FactsRow]]
    fingerprint: FingerprintFile | None = None
    predicted: PredictionFile | None = None
