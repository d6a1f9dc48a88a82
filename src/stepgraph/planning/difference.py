"""What one plan decides otherwise than another, as text: short, grouped, layers folded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
_RESULTS = ("Loss", "Grad(", "UserOutput(", "ModuleResult(", "Saved(")


def difference(mine: Plan, theirs: Plan) -> str:
    """``mine -> theirs`` for everything that differs, one line each; empty where nothing does."""
    lines = []
    for name in ("mesh", "placement", "memory", "schedule", "lowering"):
        lines += _changed(name, getattr(mine, name), getattr(theirs, name))
    if mine.settings is not None and theirs.settings is not None:
        for name in vars(mine.settings):
            lines += _changed(name, getattr(mine.settings, name), getattr(theirs.settings, name))
    if mine.fingerprint is not None and theirs.fingerprint is not None:
        lines += [f"model: {text}" for text in mine.fingerprint.differences(theirs.fingerprint)]
    lines += _programs("program", mine.placements, theirs.placements)
    for key in mine.placements.keys() & theirs.placements.keys():
        here, there = mine.placements[key], theirs.placements[key]
        for kind, starts in _INPUTS.items():
            lines += _values(
                f"{key} {kind}", _starting(here.inputs, starts), _starting(there.inputs, starts)
            )
        # What is written over an input lives where the input does.
        lines += _values(
            f"{key} results", _starting(here.outputs, _RESULTS), _starting(there.outputs, _RESULTS)
        )
        lines += _values(
            f"{key} operations",
            {name: show_operation(o) for name, o in here.operations.items()},
            {name: show_operation(o) for name, o in there.operations.items()},
        )
    for key in mine.recomputation.keys() & theirs.recomputation.keys():
        here, there = mine.recomputation[key].recompute, theirs.recomputation[key].recompute
        for text, names in (
            ("no longer recomputed", here.keys() - there.keys()),
            ("recomputed only then", there.keys() - here.keys()),
        ):
            if names:
                lines.append(f"{key}: {len(names)} values {text}: {_show_names(names, 2)}")
    lines += _predicted(mine, theirs)
    return "\n".join(lines)


def _changed(name: str, mine: object, theirs: object) -> list[str]:
    return [] if mine == theirs else [f"{name}: {mine} -> {theirs}"]


def _programs(name: str, mine: Mapping, theirs: Mapping) -> list[str]:
    only = [f"{name} {key}: only in the first" for key in mine if key not in theirs]
    return only + [f"{name} {key}: only in the second" for key in theirs if key not in mine]


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
    lines += [f"  {old} => {new}: {_show_names(names, 2)}" for (old, new), names in ranked[:_LINES]]
    if len(ranked) > _LINES:
        lines.append(f"  and {len(ranked) - _LINES} other changes")
    return lines


def _show_names(names, at_most: int) -> str:
    shown = []
    for layers, patterns in fold(names).items():
        shown += [f"{name} [{layers}]" if layers else name for name in patterns]
    more = f" and {len(shown) - at_most} more" if len(shown) > at_most else ""
    return ", ".join(shown[:at_most]) + more


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
