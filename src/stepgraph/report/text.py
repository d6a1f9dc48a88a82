"""A run and a plan as text that fits a screen, several plans side by side, and a plan as a page."""

import contextlib
import html
import math
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from stepgraph.cost.devices import find_device
from stepgraph.cost.memory import CATEGORIES, ON_HOST, memory_timeline
from stepgraph.cost.predict import Prediction
from stepgraph.cost.work import size_in_bytes
from stepgraph.errors import UsageError
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.pipeline import as_executed
from stepgraph.planning.folding import layer_of
from stepgraph.planning.plan import Plan
from stepgraph.planning.sizes import show_bytes
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.layout import show
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program

_WIDTH = 80
_LINES, _GROUPS, _COSTS, _COLLECTIVES = 40, 12, 4, 6
_SHAPE = re.compile(r"(\w+)\[([0-9, ]*)\]")


def collective_counts(program: Program) -> dict[tuple[str, str], dict[str, int]]:
    """Collectives of a Program by (phase, kind): how many, and bytes of their results per rank."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for node in filter(is_collective, program.operations()):
        row = found.setdefault((meta(node)["phase"], KINDS[node.target]), {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += size_in_bytes(meta(node)["val"])
    return found


def engine_report(plan: Plan, programs: dict[str, Program], notes: list[str], stats: Any) -> str:
    """Plan, programs as they are executed, collectives, memory, compilations and fallbacks.

    Args:
        programs: bound ones, by name.
    """
    batches = plan.request.step.micro_batches
    lines = [
        f"stepgraph: plan {plan.placement} on mesh {plan.mesh}, memory {plan.memory}, "
        f"schedule {plan.schedule}, lowering {plan.lowering}, micro-batches {batches}",
        f"  {stats.steps} steps, {stats.compiles} compilations "
        f"({stats.compile_seconds:.1f} s), {len(stats.recompiles)} of them again",
    ]
    lines += [f"    again: {reason}" for reason in stats.recompiles]
    lines += [f"  {replanned}" for replanned in stats.replans]
    if plan.predicted is not None:
        predicted = plan.predicted
        lines.append(
            f"  planned for {predicted.device}: step {predicted.step_ms:.1f} ms, "
            f"peak {show_bytes(predicted.peak_bytes)} a rank (error: {predicted.error})"
        )
    for name, program in as_executed(programs, plan.lowering).items():
        timeline = memory_timeline(program, LOWERINGS[plan.lowering].fuses)
        lines.append(
            f"  program {name}: {len(timeline.operations)} operations, "
            f"peak {show_bytes(timeline.peak())} a rank{_captured(plan, name)}"
        )
        peaks = {category: timeline.peak_of(category) for category in CATEGORIES}
        peaks[ON_HOST] = timeline.on_host
        shown = [f"{category} {show_bytes(size)}" for category, size in peaks.items() if size]
        lines.append(f"    memory: {', '.join(shown)}")
        for (phase, kind), total in sorted(collective_counts(program).items()):
            lines.append(f"    {phase}: {total['count']} x {kind}, {show_bytes(total['bytes'])}")
    lines += ["  fallbacks:"] + [f"    {note}" for note in notes] if notes else ["  no fallbacks"]
    return "\n".join(lines)


def _captured(plan: Plan, name: str) -> str:
    """How a program is captured, where its lowering captures."""
    decided = plan.decisions.get(name)
    if decided is None or decided.lowering is None or not LOWERINGS[decided.lowering.name].inner:
        return ""
    return ", CUDA graphs and what runs between" if decided.lowering.reason else ", one CUDA graph"


# -- a plan


def plan_summary(plan: Plan, model: str = "") -> str:
    """Step time, memory, collectives, placements and costs of a predicted plan: 80 columns, 40 lines."""
    heading = f"{model} on " if model else ""
    ranks = plan.mesh.world_size
    lines = [f"{heading}{plan.mesh} ({ranks} rank{'s' if ranks > 1 else ''}): "]
    lines[0] += f"{plan.placement}, memory {plan.memory}"
    if plan.request.device:
        lines.append(f"  {plan.request.show()}")
    if plan.predicted is not None:
        lines += _step(plan, plan.predicted)
        lines += _memory(plan, plan.predicted)
        lines += _collectives(plan.predicted)
        if plan.graph_obstacles is not None:
            lines.append(f"graph   {_graph(plan.graph_obstacles)}")
    lines += _placements(plan)
    if plan.predicted is not None:
        rows = plan.predicted.largest[:_COSTS]
        lines += ["largest costs", *(f"  {ms:>9,.2f} ms  {name}" for name, ms in rows)]
    lines += [f"note    {text}" for text in plan.notes]
    wrap = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
    wrapped = "\n".join(map(wrap.fill, lines)).splitlines()
    if len(wrapped) > _LINES:
        wrapped = [*wrapped[: _LINES - 1], "        ..."]
    return "\n".join(wrapped)


def _graph(obstacles: Sequence[str]) -> str:
    """Whether a step can be one CUDA graph."""
    if not obstacles:
        return "the step can be captured as one CUDA graph"
    more = f"; and {len(obstacles) - 1} more" if len(obstacles) > 1 else ""
    return f"not one CUDA graph: {obstacles[0]}{more}"


def _step(plan: Plan, predicted: Prediction) -> list[str]:
    work, counted = _work(plan)
    speed = f", {tokens_per_second(plan):,.0f} {counted}/s" if work else ""
    gap = predicted.optimality_gap
    certified = "" if gap is None else f", gap {gap:.2%} (certified)"
    return [
        f"step    {predicted.step_ms:,.1f} ms, MFU {predicted.mfu:.1%}{speed}{certified}",
        f"        compute {predicted.compute_ms:,.1f} ms, communication "
        f"{predicted.communication_ms:,.1f} ms, of which {predicted.exposed_ms:,.1f} ms exposed",
        f"        error: {predicted.error}",
    ]


def _memory(plan: Plan, predicted: Prediction) -> list[str]:
    request, capacity, beside = plan.request, None, []
    if request.device:
        with contextlib.suppress(UsageError):  # a device that is not known here
            device = find_device(request.device)
            capacity = request.memory_budget or device.capacity
            if device.beside:
                fits = predicted.peak_bytes + device.beside <= device.capacity
                verdict = "" if fits else "; with the peak it is more than the device has"
                told = (
                    f"beside tensors {show_bytes(device.beside)} ({device.beside_source}){verdict}"
                )
                beside = [" " * 8 + line for line in textwrap.wrap(told, _WIDTH - 8)]
    of = f" of {show_bytes(capacity)}" if capacity else ""
    sizes = sorted(predicted.bytes_by_category.items(), key=lambda row: -row[1])
    shown = [f"{name} {show_bytes(size)}" for name, size in sizes if size]
    return [
        f"memory  {show_bytes(predicted.peak_bytes)}{of} a rank at the peak",
        f"        without optimizer state: forward {show_bytes(predicted.forward_peak_bytes)}, "
        f"backward {show_bytes(predicted.backward_peak_bytes)}",
        f"        {', '.join(shown)}",
        *beside,
    ]


def _collectives(predicted: Prediction) -> list[str]:
    if not predicted.collectives_by_dim:
        return ["communication: none"]
    rows = sorted(predicted.collectives_by_dim.items(), key=lambda row: -row[1]["bytes"])
    lines = ["collectives on a rank"]
    lines += [
        f"  {phase:<9} {kind:<15} {dim:<10} {row['count']:>6,} x {show_bytes(row['bytes']):>12}"
        for (phase, kind, dim), row in rows[:_COLLECTIVES]
    ]
    return lines + _and_more(len(rows) - _COLLECTIVES, "kinds")


def _placements(plan: Plan) -> list[str]:
    stored = {
        label[len("Param(") : -1]: placements
        for label, placements in plan.inputs().items()
        if label.startswith("Param(")
    }
    names = plan.fingerprint.parameters if plan.fingerprint is not None else stored
    untied = [name for name in names if name in stored]
    groups = Counter((layer_of(name)[0], show(stored[name])) for name in untied)
    if not groups:
        return []
    lines = [f"parameters on ({', '.join(plan.mesh.names)})"]
    for (pattern, placements), count in list(groups.items())[:_GROUPS]:
        times = f" x{count}" if "*" in pattern else ""
        lines.append(f"  {placements:<12} {pattern}{times}")
    return lines + _and_more(len(groups) - _GROUPS, "groups of parameters")


def _and_more(count: int, of: str) -> list[str]:
    return [f"  and {count} more {of}"] if count > 0 else []


# -- several plans


def _work(plan: Plan) -> tuple[int, str]:
    """How many tokens, or rows, one step takes: of the first tensor of the batch."""
    first = next(iter(plan.request.batch.values()), "") if plan.request.device else ""
    match, counted = _SHAPE.match(first), "tokens" if first.startswith("int") else "rows"
    sizes = [int(size) for size in match[2].split(",") if size.strip()] if match else []
    if not sizes:
        return 0, counted
    of_one = math.prod(sizes) if counted == "tokens" else sizes[0]
    return of_one * plan.request.step.micro_batches, counted


def tokens_per_second(plan: Plan) -> float:
    """Of all ranks, as predicted; rows where the batch holds no tokens."""
    assert plan.predicted is not None
    return _work(plan)[0] / plan.predicted.step_ms * 1e3 if plan.predicted.step_ms else 0.0


def comparison(rows: Sequence[tuple[Plan, bool]]) -> str:
    """Plans with predictions side by side, and whether each fits; the fastest that fits first."""
    ordered = ranked(rows)
    what = _work(ordered[0][0])[1]
    header = ("mesh", "plan", "memory", "step ms", "MFU", f"{what}/s", "exposed", "peak GiB", "gap")
    table: list[tuple[str, ...]] = [header]
    for plan, fits in ordered:
        predicted = plan.predicted
        assert predicted is not None
        gap = predicted.optimality_gap
        table.append(
            (
                str(plan.mesh),
                plan.placement,
                plan.memory,
                f"{predicted.step_ms:,.1f}",
                f"{predicted.mfu:.1%}",
                f"{tokens_per_second(plan):,.0f}",
                f"{predicted.exposed_ms:,.1f}",
                f"{predicted.peak_bytes / 2**30:.2f}{'' if fits else ' !'}",
                "" if gap is None else f"{gap:.1%}",
            )
        )
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    form = "  ".join(f"{{:{'<' if i < 3 else '>'}{width}}}" for i, width in enumerate(widths))
    lines = [form.format(*row).rstrip() for row in table]
    if not all(fits for _, fits in ordered):
        lines.append("! does not fit")
    assert ordered[0][0].predicted is not None
    lines.append(f"error: {ordered[0][0].predicted.error}")
    return "\n".join(lines)


def one_line(plan: Plan, fits: bool) -> str:
    """A plan with its prediction, as one of several that are being made."""
    predicted = plan.predicted
    assert predicted is not None
    speed, what = tokens_per_second(plan), _work(plan)[1]
    peak = f"peak {show_bytes(predicted.peak_bytes)}{'' if fits else ', which does not fit'}"
    named = f"{plan.mesh}  {plan.placement}, memory {plan.memory}"
    return f"{named}: {predicted.step_ms:,.1f} ms, {speed:,.0f} {what}/s, {peak}"


def ranked(rows: Sequence[tuple[Plan, bool]]) -> list[tuple[Plan, bool]]:
    """Those that fit first, the fastest first."""
    return sorted(rows, key=lambda row: (not row[1], -tokens_per_second(row[0])))


# -- a page


def plan_page(plan: Plan, model: str = "") -> str:
    """The plan as one HTML page without links to anything: the summary, and every value's placement."""
    rows = []
    for key, decided in plan.decisions.items():
        decision = decided.placement
        for kind, placed in (("input", decision.inputs), ("output", decision.outputs)):
            rows += [(key, kind, name, show(p)) for name, p in placed.items()]
        for name, operation in decision.operations.items():
            shown = " ".join("-" if p is None else show(p) for p in operation.outputs)
            rows.append((key, "operation", name, shown))
    cells = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    title = html.escape(f"{model} on {plan.mesh}" if model else str(plan.mesh))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em}td{padding:0 1em 0 0;font-family:monospace}"
        "</style></head>\n<body><h1>"
        f"{title}</h1>\n<pre>{html.escape(plan_summary(plan, model))}</pre>\n"
        f"<h2>Every value</h2>\n<table>\n{cells}\n</table></body></html>\n"
    )
