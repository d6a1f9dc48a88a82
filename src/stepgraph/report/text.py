"""The report of a run as text that fits a screen."""

from collections import Counter
from typing import Any

from stepgraph.cost.memory import CATEGORIES, memory_timeline
from stepgraph.cost.work import size_in_bytes
from stepgraph.planning.plan import Plan
from stepgraph.program.collectives import KINDS, is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program


def collective_counts(program: Program) -> dict[tuple[str, str], dict[str, int]]:
    """Collectives of a Program by (phase, kind): how many, and bytes of their results per rank."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for node in program.operations():
        if is_collective(node):
            key = (meta(node)["phase"], KINDS[node.target])
            counts[key] += 1
            sizes[key] += size_in_bytes(meta(node)["val"])
    return {key: {"count": counts[key], "bytes": sizes[key]} for key in counts}


def engine_report(plan: Plan, programs: dict[str, Program], notes: list[str], stats: Any) -> str:
    """Plan, programs, collectives, memory, compilations and fallbacks."""
    batches = plan.request.step.micro_batches
    lines = [
        f"stepgraph: plan {plan.placement} on mesh {plan.mesh}, memory {plan.memory}, "
        f"schedule {plan.schedule}, lowering {plan.lowering}, micro-batches {batches}",
        f"  {stats.steps} steps, {stats.compiles} compilations "
        f"({stats.compile_seconds:.1f} s), {len(stats.recompiles)} of them again",
    ]
    lines += [f"    again: {reason}" for reason in stats.recompiles]
    if plan.predicted is not None:
        predicted = plan.predicted
        lines.append(
            f"  planned for {predicted.device}: step {predicted.step_ms:.1f} ms, "
            f"peak {show_bytes(predicted.peak_bytes)} a rank (error: {predicted.error})"
        )
    for name, program in programs.items():
        timeline = memory_timeline(program)
        lines.append(
            f"  program {name}: {len(timeline.operations)} operations, "
            f"peak {show_bytes(timeline.peak())} a rank"
        )
        peaks = {category: timeline.peak_of(category) for category in CATEGORIES}
        shown = [f"{category} {show_bytes(size)}" for category, size in peaks.items() if size]
        lines.append(f"    memory: {', '.join(shown)}")
        for (phase, kind), total in sorted(collective_counts(program).items()):
            lines.append(f"    {phase}: {total['count']} x {kind}, {show_bytes(total['bytes'])}")
    lines += ["  fallbacks:"] + [f"    {note}" for note in notes] if notes else ["  no fallbacks"]
    return "\n".join(lines)


def show_bytes(size: int) -> str:
    """``1.50 GiB``, ``3.2 MiB``, ``12 KiB``."""
    for unit, scale, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if size >= scale:
            return f"{size / scale:.{digits}f} {unit}"
    return f"{size / 2**10:.0f} KiB"
