"""What one plan decides otherwise than another, as text: short, grouped, layers folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from stepgraph.errors import name_a_few
from stepgraph.planning.decisions import MemoryDecision, OperationPlacement, ScheduleDecision
from stepgraph.planning.folding import fold
from stepgraph.planning.placements import show_operation
from stepgraph.program.layout import Placements, show

if TYPE_CHECKING:
    from stepgraph.planning.plan import Plan

_LINES = 6
_INPUTS = {
    "parameters": ("Param(",),
    "optimizer state": ("OptimizerState(",),
    "other inputs": ("Buffer(", "UserInput(", "Scalar(", "Accumulator(", "Seed", "Tangent"),
}
_RESULTS = ("Loss", "Grad(", "InputGrad(", "UserOutput(", "ModuleResult(", "Saved(")


def difference(mine: Plan, theirs: Plan) -> str:
    """``mine -> theirs`` for everything that differs, one line each; empty where nothing does."""
    old, new = ({**vars(p.request), **vars(p.request.step)} for p in (mine, theirs))
    asked = [name for name in old if name != "step" and old[name] != new[name]]
    lines = [f"{name}: {old[name]} -> {new[name]}" for name in asked]
    if mine.fingerprint is not None and theirs.fingerprint is not None:
        lines += [f"model: {text}" for text in mine.fingerprint.differences(theirs.fingerprint)]
    first, second = mine.decisions, theirs.decisions
    lines += [f"program {key}: only in the first" for key in first if key not in second]
    lines += [f"program {key}: only in the second" for key in second if key not in first]
    for key in first.keys() & second.keys():
        here, there = first[key].placement, second[key].placement
        for kind, starts in _INPUTS.items():
            placed = (_starting(inputs, starts) for inputs in (here.inputs, there.inputs))
            lines += _values(f"{key} {kind}", *placed)
        # What is written over an input lives where the input does.
        placed = (_starting(outputs, _RESULTS) for outputs in (here.outputs, there.outputs))
        lines += _values(f"{key} results", *placed)
        both = (here.operations, there.operations)
        shown = ({name: _shortly(o) for name, o in placed.items()} for placed in both)
        lines += _values(f"{key} operations", *shown)
        lines += _kept(key, first[key].memory, second[key].memory)
        lines += _scheduled(key, first[key].schedule, second[key].schedule)
    lines += _predicted(mine, theirs)
    return "\n".join(lines)


def _kept(key: str, mine: MemoryDecision | None, theirs: MemoryDecision | None) -> list[str]:
    if mine is None or theirs is None:
        return []
    here, there = mine.recompute.keys(), theirs.recompute.keys()
    rows = [("no longer recomputed", here - there), ("recomputed only then", there - here)]
    here, there = {*(mine.offload or ())}, {*(theirs.offload or ())}
    rows += [("no longer offloaded", here - there), ("offloaded only then", there - here)]
    lines = [
        f"{key}: {len(names)} values {text}: {_show_names(names)}" for text, names in rows if names
    ]
    before, after = mine.pieces or {}, theirs.pieces or {}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, 1), after.get(name, 1)
        lines += [f"{key}: {name} in {old} -> {new} pieces of its rows"] if old != new else []
    return lines


def _scheduled(
    key: str, mine: ScheduleDecision | None, theirs: ScheduleDecision | None
) -> list[str]:
    if mine is None or theirs is None or mine == theirs:
        return []
    lines = []
    if mine.buckets != theirs.buckets:
        lines.append(f"{key}: {len(mine.buckets)} -> {len(theirs.buckets)} flat collectives")
    lines += _values(f"{key} updates start behind", mine.updates or {}, theirs.updates or {})
    return lines + _values(f"{key} collectives complete before", mine.waits, theirs.waits)


def _shortly(operation: OperationPlacement) -> str:
    """Equal placements of neighbours once: ``RR x3``, of three arguments."""
    runs = [(word, len([*same])) for word, same in groupby(show_operation(operation).split(" "))]
    return " ".join(
        f"{word} x{count}" if count > 2 else " ".join([word] * count) for word, count in runs
    )


def _starting(placed: Mapping[str, Placements], starts: tuple[str, ...]) -> dict[str, str]:
    return {name: show(p) for name, p in placed.items() if name.startswith(starts)}


def _values(what: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Values whose placement changed, those that change alike on one line; most first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in mine.keys() | theirs.keys():
        change = mine.get(name, "none"), theirs.get(name, "none")
        if change[0] != change[1]:
            groups.setdefault(change, []).append(name)
    if not groups:
        return []
    ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    lines = [f"{what}: {sum(map(len, groups.values()))} differ"]
    lines += [f"  {old} => {new}: {_show_names(names)}" for (old, new), names in ranked[:_LINES]]
    if len(ranked) > _LINES:
        lines.append(f"  and {len(ranked) - _LINES} other changes")
    return lines


def _show_names(names: Iterable[str]) -> str:
    shown = []
    for layers, patterns in fold(names).items():
        shown += [f"{name} [{layers}]" if layers else name for name in patterns]
    return name_a_few(shown, at_most=2)


def _predicted(mine: Plan, theirs: Plan) -> list[str]:
    here, there = mine.predicted, theirs.predicted
    if here is None or there is None or here == there:
        return []
    peaks = [f"{p.peak_bytes / 2**20:,.1f} MiB" for p in (here, there)]
    return [
        f"predicted: step {here.step_ms:.2f} -> {there.step_ms:.2f} ms, "
        f"communication {here.communication_ms:.2f} -> {there.communication_ms:.2f} ms, "
        f"peak {peaks[0]} -> {peaks[1]}"
    ]
