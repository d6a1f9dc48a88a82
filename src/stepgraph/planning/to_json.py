"""A plan as plain data, for a file.

Names are folded over repeated layers (:mod:`stepgraph.planning.folding`) and grouped by what is said of
them, so that a model of 32 layers and 10,000 operations takes a few hundred KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.planning.decisions import Decisions, PlacementDecision
from stepgraph.planning.facts import ValueFacts
from stepgraph.planning.folding import fold_by, layer_of, seen_from
from stepgraph.planning.placements import show_operation
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import Request
from stepgraph.planning.schema import VERSION
from stepgraph.program.layout import Placements, show


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    data: dict[str, Any] = {
        "version": VERSION,
        "request": _write_request(plan.request),
        "notes": list(plan.notes),
        "decisions": {key: _write_decisions(decided) for key, decided in plan.decisions.items()},
        "values": {key: _write_facts(facts) for key, facts in plan.values.items()},
    }
    if plan.fingerprint is not None:
        data["fingerprint"] = vars(plan.fingerprint) | {"frozen": list(plan.fingerprint.frozen)}
    if plan.predicted is not None:
        data["predicted"] = plan.predicted.to_json()
    return data


def _write_request(request: Request) -> dict[str, Any]:
    step, precision = request.step, request.step.precision
    return vars(request) | {
        "mesh": [list(dim) for dim in request.mesh.dims],
        "step": vars(step)
        | {"precision": {name: _dtype_name(dtype) for name, dtype in vars(precision).items()}},
    }


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _write_decisions(decided: Decisions) -> dict[str, Any]:
    data: dict[str, Any] = {"placement": _write_placement(decided.placement)}
    if (memory := decided.memory) is not None:
        data["memory"] = {
            "policy": memory.policy,
            "recompute": _write_blocks(memory.recompute),
            "notes": list(memory.notes),
        }
    if (schedule := decided.schedule) is not None:
        updates = None if schedule.updates is None else _write_points(schedule.updates)
        data["schedule"] = {
            "policy": schedule.policy,
            "buckets": [list(names) for names in schedule.buckets],
            "updates": updates,
            "waits": _write_points(schedule.waits),
        }
    if decided.lowering is not None:
        data["lowering"] = vars(decided.lowering)
    return data


def _write_points(points: Mapping[str, str]) -> dict[str, Any]:
    """Operations -> those that they are told to keep to, as seen from their own layer."""
    return fold_by({name: seen_from(point, layer_of(name)[1]) for name, point in points.items()})


def _write_placement(decision: PlacementDecision) -> dict[str, Any]:
    reasons = {name: tuple(vars(reason).values()) for name, reason in decision.reasons.items()}
    return {
        "preset": decision.preset,
        "inputs": fold_by(_shown(decision.inputs)),
        "outputs": fold_by(_shown(decision.outputs)),
        "operations": fold_by({name: show_operation(o) for name, o in decision.operations.items()}),
        "unruled": decision.unruled,
        "notes": list(decision.notes),
        "reasons": [[*reason, names] for reason, names in fold_by(reasons).items()],
        "batch_dims": {name: list(dims) for name, dims in decision.batch_dims.items()},
        "optimality_gap": decision.optimality_gap,
        "held_bytes": decision.held_bytes,
        "views_apart": decision.views_apart,
    }


def _shown(placed: Mapping[str, Placements]) -> dict[str, str]:
    return {name: show(placements) for name, placements in placed.items()}


def _write_blocks(recompute: Mapping[str, int]) -> dict[str, list[str]]:
    """``{"0:2 1:3": [patterns]}``: what layer 0 recomputes in block 2, and layer 1 in block 3."""
    layers: dict[str, list[tuple[int, int]]] = {}
    found: dict[str, list[str]] = {}
    for name, block in recompute.items():
        pattern, layer = layer_of(name)
        if layer is None:
            found.setdefault(str(block), []).append(name)
        else:
            layers.setdefault(pattern, []).append((layer, block))
    for pattern, pairs in layers.items():
        text = " ".join(f"{layer}:{block}" for layer, block in sorted(pairs))
        found.setdefault(text, []).append(pattern)
    return {text: sorted(patterns) for text, patterns in found.items()}


def _write_facts(facts: Mapping[str, ValueFacts]) -> list[Any]:
    """``[type, reads, moves, names]`` for values that say the same; names of readers as seen."""
    rows: dict[str, tuple] = {}
    for name, fact in facts.items():
        layer = layer_of(name)[1]
        reads = tuple(
            (r.placement, r.count, *(seen_from(reader, layer) for reader in r.first))
            for r in fact.reads
        )
        moves = tuple((m.phase, m.kind, m.mesh_dim, m.bytes, m.count) for m in fact.moves)
        rows[name] = (fact.type, reads, moves)
    return [[*row, names] for row, names in fold_by(rows).items()]
