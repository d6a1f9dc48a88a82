"""A prediction for one training step: time, memory, communication, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from stepgraph.cost.collectives import collective_of
from stepgraph.cost.device import Device
from stepgraph.cost.memory import CATEGORIES, ON_HOST, MemoryTimeline, memory_timeline
from stepgraph.cost.simulate import StepTimeline, simulate
from stepgraph.cost.work import cost_group, matmul_dtype, node_flops
from stepgraph.errors import UsageError
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program

STATE_OUT = ("optimizer",)
_LARGEST = 12


@dataclass(frozen=True)
class Prediction:
    """What a step is predicted to take on one rank.

    Args:
        device: its name.
        step_ms, compute_ms, communication_ms, exposed_ms: of the whole step, all micro-batches.
        mfu: FLOPs of products, recomputed ones not counted, over what the publisher's peak allows.
        peak_bytes: of the whole step, optimizer state in.
        forward_peak_bytes, backward_peak_bytes: of those phases, optimizer state out.
        bytes_by_category: each category's own largest number of bytes; what is offloaded (``on the host``,
            where there is any) is in none of the others.
        collectives: (phase, kind) -> count and bytes (of the larger side) of a step.
        collectives_by_dim: the same by (phase, kind, mesh dimension).
        largest: the largest costs: (operation or group of like ones, ms).
        optimality_gap: of the plan, where a solver made it.
        error: what error predictions for the device have shown.
    """

    device: str
    step_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    mfu: float
    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    bytes_by_category: dict[str, int]
    collectives: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    collectives_by_dim: dict[tuple[str, str, str], dict[str, int]] = field(default_factory=dict)
    largest: list[tuple[str, float]] = field(default_factory=list)
    optimality_gap: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """A dictionary for ``json.dumps``; tuples as keys become ``"backward/all_gather"``."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("collectives", "collectives_by_dim"):
            found[name] = {"/".join(key): dict(value) for key, value in found[name].items()}
        found["largest"] = [list(row) for row in self.largest]
        return found

    def with_gap(self, gap: float | None) -> Prediction:
        """The same, with the optimality gap of the plan it belongs to."""
        return replace(self, optimality_gap=gap)


@dataclass(frozen=True)
class Trial:
    """One Program as it is executed, and what it takes: its time, and its memory over time."""

    program: Program
    line: StepTimeline
    memory: MemoryTimeline

    @property
    def seconds(self) -> float:
        """Of the whole of it."""
        return self.line.seconds


def try_program(program: Program, device: Device) -> Trial:
    """One Program by itself, as it is executed, on a device; its traffic is assigned."""
    return Trial(program, simulate(program, device), memory_timeline(program, _fused(program)))


def predict(programs: Mapping[str, Program], device: Device, micro_batches: int = 1) -> Prediction:
    """Predicts a step: ``accumulate``, where there is one, ``micro_batches - 1`` times, then ``step``.

    Args:
        programs: placed Programs by name; other names than these two are left out.
        device: what they would run on.
        micro_batches: of the step.
    """
    run = [name for name in programs if name == "step" or micro_batches > 1]
    return foretell({n: try_program(programs[n], device) for n in run}, device, micro_batches)


def foretell(trials: Mapping[str, Trial], device: Device, micro_batches: int = 1) -> Prediction:
    """:func:`predict`, by what each of the programs has been seen to take."""
    runs = {name: 1 if name == "step" else micro_batches - 1 for name in trials}
    tried = [
        (trials[name], runs[name])
        for name in ("accumulate", "step")
        if name in trials and runs[name] > 0
    ]
    if not tried:
        raise UsageError("there is no program 'step' to predict", do="compile the step first")
    parts = [(trial.program, trial.line, times) for trial, times in tried]
    memory = [trial.memory for trial, _ in tried]
    seconds = sum(line.seconds * times for _, line, times in parts)
    useful = sum(_ideal_seconds(program, device) * times for program, _, times in parts)
    totals: dict[str, float] = defaultdict(float)
    for _, line, times in parts:
        for event in line.events:
            totals[cost_group(event.node)] += event.seconds * times * 1e3
    return Prediction(
        device=device.name,
        step_ms=seconds * 1e3,
        compute_ms=sum(line.compute_seconds * n for _, line, n in parts) * 1e3,
        communication_ms=sum(line.communication_seconds * n for _, line, n in parts) * 1e3,
        exposed_ms=sum(line.exposed_seconds * n for _, line, n in parts) * 1e3,
        mfu=useful / seconds if seconds else 0.0,
        peak_bytes=max(timeline.peak() for timeline in memory),
        forward_peak_bytes=_peak(memory, FORWARD),
        backward_peak_bytes=_peak(memory, BACKWARD),
        bytes_by_category=_by_category(memory),
        collectives=_collectives(parts, by_dim=False),
        collectives_by_dim=_collectives(parts, by_dim=True),
        largest=sorted(totals.items(), key=lambda row: -row[1])[:_LARGEST],
        error=device.error,
    )


def _fused(program: Program) -> bool:
    """Whether the traffic that was assigned is that of fused kernels."""
    return any("kernel" in meta(node) for node in program.operations())


def _by_category(memory: list[MemoryTimeline]) -> dict[str, int]:
    found = {c: max(t.peak_of(c) for t in memory) for c in CATEGORIES}
    on_host = max(t.on_host for t in memory)
    return found | ({ON_HOST: on_host} if on_host else {})


def _peak(memory: list[MemoryTimeline], phase: str) -> int:
    return max(timeline.peak(phase, STATE_OUT) for timeline in memory)


def _ideal_seconds(program: Program, device: Device) -> float:
    """What the model's own products take at the publisher's peak."""
    total = 0.0
    for node in program.operations():
        if "recomputed_from" not in meta(node) and (flops := node_flops(node)):
            total += flops / device.peak.get(matmul_dtype(node), device.peak[torch.float32])
    return total


def _collectives(
    parts: list[tuple[Program, StepTimeline, int]], by_dim: bool
) -> dict[tuple, dict[str, int]]:
    found: dict[tuple, dict[str, int]] = {}
    for program, _, times in parts:
        for node in filter(is_collective, program.operations()):
            kind, size, mesh_dim = collective_of(node)
            key = (meta(node)["phase"], kind, *([mesh_dim] if by_dim else []))
            row = found.setdefault(key, {"count": 0, "bytes": 0})
            row["count"] += times
            row["bytes"] += size * times
    return found
