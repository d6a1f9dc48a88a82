"""A plan from the objects of a plan file: names are unfolded, placements and meshes are made of texts.

What msgspec could not check is checked here; no name is made before it is known that there are few enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

import msgspec

from stepgraph.cost.predict import Prediction
from stepgraph.errors import MeshError
from stepgraph.planning import schema
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
from stepgraph.planning.folding import as_seen, layer_of, unfold
from stepgraph.planning.placements import parse_operation, parse_placements
from stepgraph.planning.plan import Plan
from stepgraph.planning.reading import MalformedError, at
from stepgraph.planning.request import Precision, Request, StepSettings
from stepgraph.planning.table import Table
from stepgraph.program.layout import MeshShape, Placements, show

MOST_NAMES = 2_000_000
_MOST_BLOCKS = 2**20
_Said = TypeVar("_Said")


class _Names:
    """Unfolds names, so many in one file at most."""

    def __init__(self) -> None:
        self.left = MOST_NAMES

    def unfold(self, folded: schema.Folded) -> list[str]:
        return unfold(folded, self.spend)

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ValueError(f"more than {MOST_NAMES} names")


def plan_of(found: schema.PlanFile) -> Plan:
    """The plan that a file holds.

    Raises:
        MalformedError: names, placements or a mesh that make no sense.
    """
    names, mesh = _Names(), _mesh(found.request.mesh)
    fingerprint = found.fingerprint
    return Plan(
        _request(found.request, mesh),
        decisions={key: _decisions(d, mesh, names, key) for key, d in found.decisions.items()},
        fingerprint=None
        if fingerprint is None
        else Fingerprint(fingerprint.parameters, fingerprint.buffers, tuple(fingerprint.frozen)),
        predicted=None if found.predicted is None else _prediction(found.predicted),
        notes=tuple(found.notes),
        values={key: Table(_facts(rows, names, key)) for key, rows in found.values.items()},
    )


def _request(found: schema.RequestFile, mesh: MeshShape) -> Request:
    step = found.step
    compute, reduce = (
        None if name is None else schema.DTYPES[name]
        for name in (step.precision.compute, step.precision.reduce)
    )
    settings = StepSettings(
        step.optimizer, step.micro_batches, step.clip, Precision(compute, reduce), step.seed
    )
    given = msgspec.structs.asdict(found) | {"mesh": mesh, "step": settings}
    return Request(**given)


def _mesh(dims: list[tuple[str, int]]) -> MeshShape:
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


def _decisions(found: schema.DecisionsFile, mesh: MeshShape, names: _Names, key: str) -> Decisions:
    where, lowering = f"decisions.{key}", found.lowering
    return Decisions(
        _placement(found.placement, mesh, names, where),
        None if found.memory is None else _memory(found.memory, names, where),
        None if found.schedule is None else _schedule(found.schedule, names, where),
        None if lowering is None else LoweringDecision(lowering.name, lowering.reason),
    )


def _placement(
    found: schema.PlacementFile, mesh: MeshShape, names: _Names, where: str
) -> PlacementDecision:
    where = f"{where}.placement"

    def placements(text: str) -> Placements:
        return _on(mesh, parse_placements(text))

    def operation(text: str) -> OperationPlacement:
        parsed = parse_operation(text)
        for placed in (*parsed.inputs, *parsed.outputs):
            if placed is not None:
                _on(mesh, placed)
        return parsed

    reasons: dict[str, Reason] = {}
    for i, (chosen, cost, runner_up, its_cost, folded) in enumerate(found.reasons):
        with at(where, "reasons", str(i)):
            reason = Reason(chosen, cost, runner_up, its_cost)
            reasons |= dict.fromkeys(names.unfold(folded), reason)
    read = {
        "inputs": _groups(found.inputs, placements, names, f"{where}.inputs"),
        "outputs": _groups(found.outputs, placements, names, f"{where}.outputs"),
        "operations": _groups(found.operations, operation, names, f"{where}.operations"),
        "reasons": reasons,
    }
    return PlacementDecision(**msgspec.structs.asdict(found) | read)


def _on(mesh: MeshShape, placements: Placements) -> Placements:
    if len(placements) != len(mesh.dims):
        raise ValueError(f"{show(placements)} has {len(placements)} placements, the mesh is {mesh}")
    return placements


def _groups(
    groups: schema.Groups, read: Callable[[str], _Said], names: _Names, where: str
) -> dict[str, _Said]:
    found: dict[str, _Said] = {}
    count = 0
    for text, folded in groups.items():
        with at(where, text):
            group = names.unfold(folded)
            count += len(group)
            found |= dict.fromkeys(group, read(text))
    if len(found) != count:
        raise MalformedError(where, "a name stands in it twice")
    return found


def _schedule(found: schema.ScheduleFile, names: _Names, where: str) -> ScheduleDecision:
    def points(groups: schema.Groups, kind: str) -> Table[str, str]:
        read = _groups(groups, str, names, f"{where}.schedule.{kind}")
        return Table((name, as_seen(point, layer_of(name)[1])) for name, point in read.items())

    return ScheduleDecision(
        found.policy,
        tuple(map(tuple, found.buckets)),
        None if found.updates is None else points(found.updates, "updates"),
        points(found.waits, "waits"),
    )


def _memory(found: schema.MemoryFile, names: _Names, where: str) -> MemoryDecision:
    recompute: dict[str, int] = {}
    for text, patterns in found.recompute.items():
        with at(where, "memory.recompute", text):
            if ":" not in text:
                recompute |= dict.fromkeys(patterns, _block(text))
                continue
            pairs = (part.partition(":") for part in text.split())
            layers = {_block(layer): _block(block) for layer, _, block in pairs}
            names.spend(len(layers) * len(patterns))
            for pattern in patterns:
                if pattern.count("*") != 1:
                    raise ValueError(
                        f"{pattern[:60]!r} does not say where the layer's number stands"
                    )
                recompute |= {pattern.replace("*", str(i)): block for i, block in layers.items()}
    return MemoryDecision(found.policy, recompute, tuple(found.notes))


def _block(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 8:
        raise ValueError(f"{text[:20]!r} is not the number of a layer or a block")
    if not -1 <= int(text) <= _MOST_BLOCKS:
        raise ValueError(f"{text} is not between -1 and {_MOST_BLOCKS}")
    return int(text)


def _prediction(found: schema.PredictionFile) -> Prediction:
    given = {f.name: getattr(found, f.name) for f in fields(Prediction)}
    for name, form in (("collectives", "phase/kind"), ("collectives_by_dim", "phase/kind/dim")):
        for key in given[name]:
            if key.count("/") != form.count("/"):
                raise MalformedError(f"predicted.{name}", f"{key[:60]!r} is not of the form {form}")
        given[name] = {
            tuple(key.split("/")): msgspec.structs.asdict(volume)
            for key, volume in given[name].items()
        }
    return Prediction(**given)


def _facts(rows: list[schema.FactsRow], names: _Names, key: str) -> dict[str, ValueFacts]:
    found: dict[str, ValueFacts] = {}
    for i, (shown, reads, moves, folded) in enumerate(rows):
        where = f"values.{key}.{i}"
        read = [_reads(row, f"{where}.1") for row in reads]
        moved = tuple(Moves(*row) for row in moves)
        with at(where):
            unfolded = names.unfold(folded)
        for name in unfolded:
            layer = layer_of(name)[1]
            seen = tuple(
                Reads(r.placement, r.count, tuple(as_seen(reader, layer) for reader in r.first))
                for r in read
            )
            found[name] = ValueFacts(shown, seen, moved)
    return found


def _reads(row: schema.ReadsRow, where: str) -> Reads:
    placement, count, *first = row
    readers = tuple(name for name in first if isinstance(name, str))
    if not isinstance(placement, str) or not isinstance(count, int) or len(readers) < len(first):
        raise MalformedError(where, "a placement, a count and names of readers are expected")
    return Reads(placement, count, readers)
