"""A plan as JSON, and back. What a file says is checked before anything is made of it.

Names are folded over repeated layers (:mod:`stepgraph.planning.folding`) and grouped by what is said of
them, so that a model of 32 layers and 10,000 operations takes a few hundred KiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stepgraph.cost.predict import Prediction
from stepgraph.errors import MeshError, PlanError, UsageError
from stepgraph.planning.decisions import (
    Decisions,
    LoweringDecision,
    MemoryDecision,
    OperationPlacement,
    PlacementDecision,
    Reason,
    ScheduleDecision,
)
from stepgraph.planning.facts import Moves, Reads, ValueFacts
from stepgraph.planning.fingerprint import Fingerprint
from stepgraph.planning.folding import as_seen, fold_by, layer_of, seen_from
from stepgraph.planning.placements import parse_operation, parse_placements, show_operation
from stepgraph.planning.plan import Plan
from stepgraph.planning.reading import LARGEST_FILE, Item, MalformedError, check_plain, read_json
from stepgraph.planning.request import Precision, Request, StepSettings
from stepgraph.planning.table import Table
from stepgraph.program.layout import MeshShape, Placements, show

VERSION = 3
_MOST_MESH_DIMS, _MOST_RANKS = 8, 2**20
_MOST_BLOCKS = 2**20
_DTYPES = {_name: getattr(torch, _name) for _name in ("bfloat16", "float16", "float32", "float64")}


def save_plan(plan: Plan, path: Path) -> None:
    """Writes a plan file."""
    path.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n")


def load_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
        PlanError: no file, not a plan, malformed, of another version, or too large.
    """
    if not path.is_file():
        raise PlanError(f"there is no plan file {str(path)!r}")
    if path.stat().st_size > LARGEST_FILE:
        raise PlanError(
            f"{path} is larger than {LARGEST_FILE // 2**20} MiB: not a plan",
            do="plans of a thousand layers are smaller",
        )
    try:
        plan = _read_plan(read_json(path))
    except MalformedError as error:
        raise PlanError(
            f"{path} is not a plan file",
            where=error.where,
            why=error.problem,
            do="save the plan again: `stepgraph plan ... -o plan.json`, or plan.save(path)",
        ) from error
    except OSError as error:
        raise PlanError(f"{path} cannot be read", why=str(error)) from error
    return replace(plan, final=True)


def plan_from_json(data: Any) -> Plan:
    """The plan in plain data.

    Raises:
        PlanError: malformed, or of another version.
    """
    try:
        return _read_plan(Item(data))
    except MalformedError as error:
        raise PlanError("this is not a plan", where=error.where, why=error.problem) from error


# -- writing


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


# -- reading


def _read_plan(data: Item) -> Plan:
    version = data.field("version").integer(0)
    if version != VERSION:
        raise PlanError(
            f"plan version {version} cannot be read, only {VERSION}",
            do="make the plan again with this version of stepgraph",
        )
    request = _read_request(data.field("request"))
    predicted, fingerprint = data.optional("predicted"), data.optional("fingerprint")
    return Plan(
        request,
        decisions={
            key: _read_decisions(item, request.mesh)
            for key, item in data.field("decisions").fields()
        },
        fingerprint=None if fingerprint is None else _read_fingerprint(fingerprint),
        predicted=None if predicted is None else _read_prediction(predicted),
        notes=tuple(data.field("notes").texts()),
        values={key: Table(_read_facts(item)) for key, item in data.field("values").fields()},
    )


def _read_request(item: Item) -> Request:
    step, budget = item.field("step"), item.optional("memory_budget")
    optimizer, precision = step.optional("optimizer"), step.field("precision")
    return Request(
        item.field("placement").text(),
        _read_mesh(item.field("mesh")),
        item.field("memory").text(),
        item.field("schedule").text(),
        item.field("lowering").text(),
        StepSettings(
            None if optimizer is None else optimizer.text(),
            step.field("micro_batches").integer(1),
            step.field("clip").truth(),
            Precision(_read_dtype(precision, "compute"), _read_dtype(precision, "reduce")),
            step.field("seed").integer(-(2**63)),
        ),
        item.field("device").text(),
        {name: shown.type() for name, shown in item.field("batch").fields()},
        None if budget is None else budget.integer(1),
        {name: wanted.text() for name, wanted in item.field("constraints").fields()},
    )


def _read_dtype(item: Item, name: str) -> torch.dtype | None:
    found = item.optional(name)
    if found is None:
        return None
    if found.text() not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise found.refuse(f"{found.text()[:40]!r} is no floating-point type; known: {known}")
    return _DTYPES[found.text()]


def _read_decisions(item: Item, mesh: MeshShape) -> Decisions:
    memory, schedule = item.optional("memory"), item.optional("schedule")
    lowering = item.optional("lowering")
    return Decisions(
        _read_placement(item.field("placement"), mesh),
        None if memory is None else _read_memory(memory),
        None if schedule is None else _read_schedule(schedule),
        None
        if lowering is None
        else LoweringDecision(lowering.field("name").text(), lowering.field("reason").text()),
    )


def _read_schedule(item: Item) -> ScheduleDecision:
    updates = item.optional("updates")
    return ScheduleDecision(
        item.field("policy").text(),
        tuple(tuple(names.texts()) for names in item.field("buckets").items()),
        None if updates is None else _read_points(updates),
        _read_points(item.field("waits")),
    )


def _read_points(item: Item) -> Table[str, str]:
    """The inverse of :func:`_write_points`."""
    return Table(
        (name, as_seen(point, layer_of(name)[1]))
        for point, names in item.fields()
        for name in names.names()
    )


def _read_mesh(item: Item) -> MeshShape:
    dims = []
    rows = item.items()
    if not 1 <= len(rows) <= _MOST_MESH_DIMS:
        raise item.refuse(f"a mesh has 1 to {_MOST_MESH_DIMS} dimensions, not {len(rows)}")
    for row in rows:
        name, size = row.items(2)
        if not name.text().isidentifier():
            raise name.refuse(f"{name.text()[:40]!r} is no name of a mesh dimension")
        dims.append((name.text(), size.integer(1, _MOST_RANKS)))
    try:
        mesh = MeshShape(tuple(dims))
    except MeshError as error:
        raise item.refuse(f"{error.what}; {error.do}") from error
    if len(set(mesh.names)) != len(dims) or mesh.world_size > _MOST_RANKS:
        raise item.refuse(f"{mesh} names a dimension twice, or more than {_MOST_RANKS} ranks")
    return mesh


def _read_placement(item: Item, mesh: MeshShape) -> PlacementDecision:
    def placements(text: str) -> Placements:
        return _on(mesh, parse_placements(text))

    def operation(text: str) -> OperationPlacement:
        found = parse_operation(text)
        for placed in (*found.inputs, *found.outputs):
            if placed is not None:
                _on(mesh, placed)
        return found

    reasons = {}
    for row in item.field("reasons").items():
        *_, names = cells = row.items(5)
        reason = Reason(
            cells[0].text(),
            _number(cells[1]),
            None if cells[2].value is None else cells[2].text(),
            _number(cells[3]),
        )
        reasons |= dict.fromkeys(names.names(), reason)
    gap = item.optional("optimality_gap")
    return PlacementDecision(
        item.field("preset").text(),
        _read_groups(item.field("inputs"), placements),
        _read_groups(item.field("outputs"), placements),
        _read_groups(item.field("operations"), operation),
        {name: target.text() for name, target in item.field("unruled").fields()},
        tuple(item.field("notes").texts()),
        reasons,
        {name: _pair(dims) for name, dims in item.field("batch_dims").fields()},
        None if gap is None else gap.number(),
        item.field("held_bytes").integer(0),
        item.field("views_apart").truth(),
    )


def _pair(item: Item) -> tuple[int, int]:
    dim, blocks = item.items(2)
    return dim.integer(0, 64), blocks.integer(1)


def _on(mesh: MeshShape, placements: Placements) -> Placements:
    if len(placements) != len(mesh.dims):
        raise ValueError(f"{show(placements)} has {len(placements)} placements, the mesh is {mesh}")
    return placements


def _number(item: Item) -> float | None:
    return None if item.value is None else item.number(low=None)


def _read_groups(item: Item, convert: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    count = 0
    for text, names in item.fields():
        value = Item(text, names.where).read(convert)
        group = names.names()
        count += len(group)
        found |= dict.fromkeys(group, value)
    if len(found) != count:
        raise item.refuse("a name stands in it twice")
    return found


def _read_memory(item: Item) -> MemoryDecision:
    recompute: dict[str, int] = {}
    for text, patterns in item.field("recompute").fields():
        if ":" not in text:
            block = _block(text, patterns)
            recompute |= dict.fromkeys(patterns.texts(), block)
            continue
        pairs = [part.partition(":") for part in text.split()]
        numbers = [(_block(layer, patterns), _block(block, patterns)) for layer, _, block in pairs]
        for pattern in patterns.patterns(layers=len(pairs)):
            head, _, tail = pattern.partition("*")
            recompute |= {f"{head}{layer}{tail}": block for layer, block in numbers}
    notes = tuple(item.field("notes").texts())
    return MemoryDecision(item.field("policy").text(), recompute, notes)


def _block(text: str, item: Item) -> int:
    if not text.removeprefix("-").isdigit() or len(text) > 8:
        raise item.refuse(f"{text[:20]!r} is not the number of a layer or a block")
    return Item(int(text), item.where).integer(-1, _MOST_BLOCKS)


def _read_fingerprint(item: Item) -> Fingerprint:
    return Fingerprint(
        {name: shown.type() for name, shown in item.field("parameters").fields()},
        {name: shown.type() for name, shown in item.field("buffers").fields()},
        tuple(item.field("frozen").texts()),
    )


def _read_prediction(item: Item) -> Prediction:
    check_plain(item)
    for name in ("peak_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        item.field(name).integer(0)
    for name in ("step_ms", "compute_ms", "communication_ms", "exposed_ms", "mfu"):
        item.field(name).number()
    for name in ("device", "error"):
        item.field(name).text()
    for _, size in item.field("bytes_by_category").fields():
        size.integer(0)
    for name, parts in (("collectives", 2), ("collectives_by_dim", 3)):
        for key, row in item.field(name).fields():
            if key.count("/") != parts - 1:
                raise row.refuse(f"{key[:60]!r} has not {parts} parts")
            row.field("count").integer(0)
            row.field("bytes").integer(0)
    if (gap := item.optional("optimality_gap")) is not None:
        gap.number()
    try:
        return Prediction.from_json(item.value)
    except UsageError as error:
        raise item.refuse(error.what) from error


def _read_facts(item: Item) -> dict[str, ValueFacts]:
    found: dict[str, ValueFacts] = {}
    for row in item.items():
        kind, reads, moves, names = row.items(4)
        shown = kind.type()
        read = []
        for entry in reads.items():
            placement, count, *first = entry.items()
            read.append((placement.text(), count.integer(0), [name.text() for name in first]))
        moved = []
        for entry in moves.items():
            phase, kind, dim, size, count = entry.items(5)
            sizes = size.integer(0), count.integer(0)
            moved.append(Moves(phase.text(), kind.text(), dim.text(), *sizes))
        for name in names.names():
            layer = layer_of(name)[1]
            seen = tuple(
                Reads(placement, count, tuple(as_seen(reader, layer) for reader in first))
                for placement, count, first in read
            )
            found[name] = ValueFacts(shown, seen, tuple(moved))
    return found
