"""Plan files, version 4: a plan as plain data, and back; :mod:`stepgraph.planning.schema` checks them.

Names are folded over repeated layers (:mod:`stepgraph.planning.folding`) and grouped by what is said of
them, so that a model of 32 layers and 10,000 operations takes a few hundred KiB. No name is made before it
is known that there are few enough.
"""

import json
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from stepgraph.cost.predict import Prediction
from stepgraph.errors import MeshError, PlanError
from stepgraph.planning import reading, schema
from stepgraph.planning.decisions import (
    Decisions,
    MemoryDecision,
    OperationPlacement,
    PlacementDecision,
    Reason,
    ScheduleDecision,
    Table,
)
from stepgraph.planning.facts import Moves, Reads, ValueFacts
from stepgraph.planning.folding import as_seen, fold, fold_by, layer_of, seen_from, unfold
from stepgraph.planning.placements import parse_operation, parse_placements, show_operation
from stepgraph.planning.plan import Plan
from stepgraph.planning.reading import LARGEST_FILE, MalformedError, at
from stepgraph.program.driver import no_collections
from stepgraph.program.layout import MeshShape, Placements, show

MOST_NAMES = 2_000_000
_MOST_BLOCKS = 2**20
_Said = TypeVar("_Said")


def save_plan(plan: Plan, path: Path) -> None:
    """Writes a plan file."""
    with no_collections():
        text = json.dumps(plan_to_json(plan), indent=1)
    path.write_text(text + "\n")


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
        plan = _read_plan(reading.parse_json(reading.read_bytes(path)))
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
        return _read_plan(data)
    except MalformedError as error:
        raise PlanError("this is not a plan", where=error.where, why=error.problem) from error


# -- writing


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    data: dict[str, Any] = {
        "version": schema.VERSION,
        "request": vars(plan.request) | {"mesh": plan.mesh.dims},
        "notes": plan.notes,
        "decisions": {key: _write_decisions(decided) for key, decided in plan.decisions.items()},
        "values": {key: _write_facts(facts) for key, facts in plan.values.items()},
    }
    if plan.fingerprint is not None:
        data["fingerprint"] = plan.fingerprint
    if plan.predicted is not None:
        data["predicted"] = plan.predicted.to_json()
    if plan.points is not None:
        data["points"] = plan.points
    if plan.graph_obstacles is not None:
        data["graph_obstacles"] = plan.graph_obstacles
    # Through text: lists where there are tuples, as whoever reads the file will have them.
    return json.loads(json.dumps(msgspec.to_builtins(data, enc_hook=_plain, str_keys=True)))


def _plain(value: Any) -> Any:
    """What msgspec does not know: types, and numbers of other libraries."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} cannot stand in a plan file")


def _write_decisions(decided: Decisions) -> dict[str, Any]:
    data = {name: decision for name, decision in vars(decided).items() if decision is not None}
    data["placement"] = _write_placement(decided.placement)
    if (memory := decided.memory) is not None:
        offload = None if memory.offload is None else fold(memory.offload)
        data["memory"] = vars(memory) | {
            "recompute": _write_blocks(memory.recompute), "offload": offload
        }  # fmt: skip
    if (schedule := decided.schedule) is not None:
        updates = None if schedule.updates is None else _write_points(schedule.updates)
        points = {"updates": updates, "waits": _write_points(schedule.waits)}
        data["schedule"] = vars(schedule) | points
    return data


def _write_points(points: Mapping[str, str]) -> dict[str, Any]:
    """Operations -> those that they are told to keep to, as seen from their own layer."""
    return fold_by({name: seen_from(point, layer_of(name)[1]) for name, point in points.items()})


def _write_placement(decision: PlacementDecision) -> dict[str, Any]:
    reasons = {name: tuple(vars(reason).values()) for name, reason in decision.reasons.items()}
    operations = {name: show_operation(o) for name, o in decision.operations.items()}
    return vars(decision) | {
        "inputs": fold_by({name: show(placed) for name, placed in decision.inputs.items()}),
        "outputs": fold_by({name: show(placed) for name, placed in decision.outputs.items()}),
        "operations": fold_by(operations),
        "reasons": [[*reason, names] for reason, names in fold_by(reasons).items()],
    }


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
        rows[name] = (fact.type, reads, tuple(tuple(vars(m).values()) for m in fact.moves))
    return [[*row, names] for row, names in fold_by(rows).items()]


# -- reading


def _read_plan(data: Any) -> Plan:
    """Of another version, no field is read: its fields are other ones."""
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != schema.VERSION:
        raise PlanError(
            f"plan version {str(version)[:20]} cannot be read, only {schema.VERSION}",
            do="make the plan again with this version of stepgraph",
        )
    found: Any = reading.convert(data, schema.PlanFile)
    mesh = _read_mesh(found.request.mesh)
    reader = _Reader(mesh)
    return Plan(
        schema.made_of(found.request, mesh=mesh),
        decisions={key: reader.decisions(d, key) for key, d in found.decisions.items()},
        fingerprint=schema.made_of(found.fingerprint),
        predicted=None if found.predicted is None else _read_prediction(found.predicted),
        notes=found.notes,
        points=None if found.points is None else tuple(map(schema.made_of, found.points)),
        values={key: Table(reader.facts(rows, key)) for key, rows in found.values.items()},
        graph_obstacles=found.graph_obstacles,
    )


def _read_mesh(dims: list[tuple[str, int]]) -> MeshShape:
    for i, (name, _) in enumerate(dims):
        if not name.isidentifier():
            raise MalformedError(
                f"request.mesh.{i}.0", f"{name[:40]!r} is no name of a mesh dimension"
            )
    try:
        mesh = MeshShape(tuple(dims))
    except MeshError as error:
        raise MalformedError("request.mesh", f"{error.what}; {error.do}") from error
    if len(set(mesh.names)) != len(dims) or mesh.world_size > schema.MOST_RANKS:
        problem = f"{mesh} names a dimension twice, or more than {schema.MOST_RANKS} ranks"
        raise MalformedError("request.mesh", problem)
    return mesh


def _read_prediction(found: Any) -> Prediction:
    tables: dict[str, Any] = {}
    for name, form in (("collectives", "phase/kind"), ("collectives_by_dim", "phase/kind/dim")):
        volumes = getattr(found, name)
        for key in volumes:
            if key.count("/") != form.count("/"):
                raise MalformedError(f"predicted.{name}", f"{key[:60]!r} is not of the form {form}")
        tables[name] = {
            tuple(key.split("/")): msgspec.structs.asdict(volume) for key, volume in volumes.items()
        }
    return schema.made_of(found, **tables)


class _Reader:
    """Reads what msgspec cannot check: placements on the file's mesh, and so many names at most."""

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh, self.names_left = mesh, MOST_NAMES

    def spend(self, names: int) -> None:
        self.names_left -= names
        if self.names_left < 0:
            raise ValueError(f"more than {MOST_NAMES} names")

    def decisions(self, found: Any, key: str) -> Decisions:
        where = f"decisions.{key}"
        return Decisions(
            self.placement(found.placement, f"{where}.placement"),
            None if found.memory is None else self.memory(found.memory, f"{where}.memory"),
            None if found.schedule is None else self.schedule(found.schedule, f"{where}.schedule"),
            schema.made_of(found.lowering),
        )

    def placement(self, found: Any, where: str) -> PlacementDecision:
        reasons: dict[str, Reason] = {}
        for i, (*reason, folded) in enumerate(found.reasons):
            with at(where, "reasons", str(i)):
                reasons |= dict.fromkeys(unfold(folded, self.spend), Reason(*reason))
        return schema.made_of(
            found,
            inputs=self.groups(found.inputs, self.placements, f"{where}.inputs"),
            outputs=self.groups(found.outputs, self.placements, f"{where}.outputs"),
            operations=self.groups(found.operations, self.operation, f"{where}.operations"),
            reasons=reasons,
        )

    def placements(self, text: str) -> Placements:
        return self.on_mesh(parse_placements(text))

    def operation(self, text: str) -> OperationPlacement:
        parsed = parse_operation(text)
        for placed in (*parsed.inputs, *parsed.outputs):
            if placed is not None:
                self.on_mesh(placed)
        return parsed

    def on_mesh(self, placed: Placements) -> Placements:
        if len(placed) != len(self.mesh.dims):
            raise ValueError(
                f"{show(placed)} has {len(placed)} placements, the mesh is {self.mesh}"
            )
        return placed

    def groups(
        self, groups: schema.Groups, read: Callable[[str], _Said], where: str
    ) -> dict[str, _Said]:
        found: dict[str, _Said] = {}
        count = 0
        for text, folded in groups.items():
            with at(where, text):
                names = unfold(folded, self.spend)
                count += len(names)
                found |= dict.fromkeys(names, read(text))
        if len(found) != count:
            raise MalformedError(where, "a name stands in it twice")
        return found

    def memory(self, found: Any, where: str) -> MemoryDecision:
        recompute: dict[str, int] = {}
        for text, patterns in found.recompute.items():
            with at(where, "recompute", text):
                if ":" not in text:
                    recompute |= dict.fromkeys(patterns, _read_block(text))
                    continue
                pairs = (part.partition(":") for part in text.split())
                layers = {_read_block(layer): _read_block(block) for layer, _, block in pairs}
                self.spend(len(layers) * len(patterns))
                for pattern in patterns:
                    if pattern.count("*") != 1:
                        raise ValueError(
                            f"{pattern[:60]!r} does not say where the layer's number stands"
                        )
                    recompute |= {pattern.replace("*", str(i)): b for i, b in layers.items()}
        with at(where, "offload"):
            offload = None if found.offload is None else sorted(unfold(found.offload, self.spend))
        return schema.made_of(found, recompute=recompute, offload=offload)

    def schedule(self, found: Any, where: str) -> ScheduleDecision:
        updates = found.updates
        return schema.made_of(
            found,
            updates=None if updates is None else self.points(updates, f"{where}.updates"),
            waits=self.points(found.waits, f"{where}.waits"),
        )

    def points(self, groups: schema.Groups, where: str) -> dict[str, str]:
        read = self.groups(groups, str, where)
        return {name: as_seen(point, layer_of(name)[1]) for name, point in read.items()}

    def facts(self, rows: list[schema.FactsRow], key: str) -> dict[str, ValueFacts]:
        found: dict[str, ValueFacts] = {}
        for i, (shown, reads, moves, folded) in enumerate(rows):
            where = f"values.{key}.{i}"
            read = [_read_reads(row, f"{where}.1") for row in reads]
            moved = tuple(Moves(*row) for row in moves)
            with at(where):
                names = unfold(folded, self.spend)
            for name in names:
                layer = layer_of(name)[1]
                seen = tuple(
                    replace(r, first=tuple(as_seen(reader, layer) for reader in r.first))
                    for r in read
                )
                found[name] = ValueFacts(shown, seen, moved)
        return found


def _read_block(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 8:
        raise ValueError(f"{text[:20]!r} is not the number of a layer or a block")
    if not -1 <= int(text) <= _MOST_BLOCKS:
        raise ValueError(f"{text} is not between -1 and {_MOST_BLOCKS}")
    return int(text)


def _read_reads(row: schema.ReadsRow, where: str) -> Reads:
    placement, count, *first = row
    readers = tuple(name for name in first if isinstance(name, str))
    if not isinstance(placement, str) or not isinstance(count, int) or len(readers) < len(first):
        raise MalformedError(where, "a placement, a count and names of readers are expected")
    return Reads(placement, count, readers)
