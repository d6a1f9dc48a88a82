"""Why a value lives where it does: a plan's answer for any value, by its stable name."""

import difflib
import re

from stepgraph.errors import UsageError
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.planning.facts import Moves, Reads, ValueFacts
from stepgraph.planning.folding import layer_of
from stepgraph.planning.plan import Plan, is_state
from stepgraph.program.layout import MeshShape, Placements, show

_KINDS = {
    "Param": "parameter",
    "Buffer": "buffer",
    "Outside": "tensor from outside",
    "UserInput": "input",
    "OptimizerState": "optimizer state",
    "Scalar": "number of the step",
    "NewParam": "updated parameter",
    "NewBuffer": "updated buffer",
    "NewOptimizerState": "updated optimizer state",
    "Grad": "gradient",
    "Loss": "the loss",
}
_CAST = re.compile(r"/to(\.\d+)?$")
_WORDS = {"R": "whole on every rank of", "P": "a pending sum over"}


def explain(plan: Plan, value: str) -> str:
    """What the plan says of a value, as text.

    Args:
        value: the name of a parameter, buffer, input (``labels`` or ``input:labels``), operation, or
            a label such as ``NewParam(lm_head.weight)``.

    Raises:
        UsageError: no value has this name; the message lists near misses.
    """
    parts = []
    for key, decided in plan.decisions.items():
        for name in _find(decided.placement, value):
            parts.append(_explain_one(plan, key, decided.placement, name))
    if not parts:
        raise UsageError(f"the plan has no value {value!r}", do=_near_misses(plan, value))
    return "\n\n".join(parts)


def overview(plan: Plan) -> str:
    """How values are named, with examples, for someone who does not know what to ask for."""
    lines = [f"plan {plan.placement} on mesh {plan.mesh}, memory {plan.memory}"]
    for key, decided in plan.decisions.items():
        decision = decided.placement
        lines.append(
            f"program {key}: {len(decision.inputs)} inputs, {len(decision.operations)} operations, "
            f"{len(decision.outputs)} outputs"
        )
        for start in ("Param", "UserInput", ""):
            names = [*decision.inputs] if start else [*decision.operations]
            names = [layer_of(_bare(name))[0] for name in names if name.startswith(start)]
            lines += [f"  {name}" for name in list(dict.fromkeys(names))[:5]]
    return "\n".join(lines)


def _find(decision: PlacementDecision, value: str) -> list[str]:
    """The labels and names that a user's word means: exact ones, else by role."""
    known = (decision.inputs, decision.operations, decision.outputs)
    if any(value in names for names in known):
        return [value]
    word = value.removeprefix("input:")
    labels = [f"{kind}({word})" for kind in ("Param", "Buffer", "OptimizerState", "Scalar")]
    found = [label for label in labels if label in decision.inputs]
    if not found:
        path = re.compile(rf"UserInput\(\d+\.{re.escape(word)}\)")
        found = [label for label in decision.inputs if path.fullmatch(label)]
    return found or [label for label in decision.outputs if label == value.capitalize()]


def _explain_one(plan: Plan, key: str, decision: PlacementDecision, name: str) -> str:
    facts = plan.values.get(key, {}).get(name, ValueFacts(""))
    lives, kind = _lives(decision, name)
    program = "" if key == "step" else f" of program {key}"
    lines = [f"{_bare(name)}: {kind}{program}{f', {facts.type}' if facts.type else ''}"]
    rows = [("lives", _in_words(lives, plan.mesh))]
    if name in decision.operations:
        wanted = decision.operations[name].inputs
        rows.append(("reads", "its arguments as " + ", ".join(map(show, wanted))))
    rows += [("read as", text) for text in map(_show_reads, facts.reads)]
    rows += _chosen(decision, name, plan.placement)
    rows += _memory(plan, key, name)
    rows += _schedule(plan, key, name)
    rows += [("moves", text) for text in map(_show_moves, facts.moves)]
    readers = [name for reads in facts.reads for name in reads.first]
    for reader in filter(_CAST.search, readers):
        cast = plan.values[key].get(reader, ValueFacts(""))
        rows += [("cast", f"{reader}, read as {text}") for text in map(_show_reads, cast.reads)]
        rows += [("moves", f"{text} (of the cast)") for text in map(_show_moves, cast.moves)]
        rows += [("cast", text) for _, text in _memory(plan, key, reader) if "kept" not in text]
    silent = name not in decision.outputs and not any(label == "moves" for label, _ in rows)
    if silent and facts.type:
        rows.append(("moves", "causes no collective"))
    return "\n".join([*lines, *(f"  {label:<8} {text}" for label, text in rows)])


def _lives(decision: PlacementDecision, name: str) -> tuple[tuple[Placements | None, ...], str]:
    kind = _KINDS.get(name.partition("(")[0], "value")
    if name in decision.inputs:
        return (decision.inputs[name],), kind
    if name in decision.operations:
        return decision.operations[name].outputs, "operation"
    return (decision.outputs[name],), kind


def _bare(name: str) -> str:
    """A label as a user writes it: parameters, buffers and inputs by name alone."""
    kind, _, rest = name.partition("(")
    if kind == "UserInput":
        rest = rest.partition(".")[2]
    return rest.removesuffix(")") if kind in ("Param", "Buffer", "UserInput") and rest else name


def _in_words(lives: tuple[Placements | None, ...], mesh: MeshShape) -> str:
    """``S(0)R: dimension 0 sharded over dp=16; whole on every rank of tp=8``."""
    texts = []
    for placements in lives:
        if placements is None:
            continue
        words = []
        for (dim, ranks), placement in zip(mesh.dims, placements, strict=True):
            shown = show((placement,))
            sharded = f"dimension {getattr(placement, 'dim', 0)} sharded over"
            words.append(f"{_WORDS.get(shown[0], sharded)} {dim}={ranks}")
        texts.append(f"{show(placements)}: {'; '.join(words)}")
    return " | ".join(dict.fromkeys(texts)) or "no tensor"


def _show_reads(reads: Reads) -> str:
    more = f" and {reads.count - len(reads.first)} more" if reads.count > len(reads.first) else ""
    return f"{reads.placement} by {', '.join(reads.first)}{more}"


def _show_moves(moves: Moves) -> str:
    times = f"{moves.count} x " if moves.count > 1 else ""
    return (
        f"{moves.phase}: {times}{moves.kind} over {moves.mesh_dim}, {moves.bytes / 2**20:.2f} MiB"
    )


def _chosen(decision: PlacementDecision, name: str, policy: str) -> list[tuple[str, str]]:
    reason = decision.reasons.get(name)
    if reason is None and decision.preset != policy:
        return [("chosen", f"by {policy}: the preset {decision.preset} costs least as a whole")]
    if reason is None:
        return [("chosen", f"by the preset {decision.preset}, which has no alternatives")]
    instead = "there was no other choice"
    if reason.runner_up is not None:
        instead = f"{reason.runner_up}{_cost(reason.runner_up_cost_ms)}"
    return [("chosen", f"{reason.chosen}{_cost(reason.cost_ms)}"), ("instead", instead)]


def _cost(ms: float | None) -> str:
    return "" if ms is None else f", {ms:.4g} ms"


def _memory(plan: Plan, key: str, name: str) -> list[tuple[str, str]]:
    decision = plan.decisions[key].memory
    if decision is not None and is_state(name) and name in (decision.offload or ()):
        return [("memory", "waits in the host's memory from one update to the next")]
    of_forward = ".backward" not in name and ".optimizer" not in name
    if decision is None or name not in plan.decisions[key].placement.operations or not of_forward:
        return []
    text, block = "kept, if the backward reads it", decision.recompute.get(name)
    if block is not None:
        again = "gathered again in the backward, not kept"
        text = again if block < 0 else f"recomputed in the backward, in block {block}"
    if name in (decision.offload or ()):
        text = "waits for the backward in the host's memory, and is copied back before it is read"
    if pieces := (decision.pieces or {}).get(name):
        text = f"never whole: in {pieces} pieces of its rows, each with its loss and its backward"
    return [("memory", text)]


def _schedule(plan: Plan, key: str, name: str) -> list[tuple[str, str]]:
    decision = plan.decisions[key].schedule
    start = None if decision is None or decision.updates is None else decision.updates.get(name)
    return [("schedule", f"its update may start behind {start}")] if start else []


def _near_misses(plan: Plan, value: str) -> str:
    placed = [decided.placement for decided in plan.decisions.values()]
    groups = [group for p in placed for group in (p.inputs, p.operations, p.outputs)]
    names = list(dict.fromkeys(_bare(name) for group in groups for name in group))
    close = difflib.get_close_matches(value, names, n=5, cutoff=0.5)
    close = close or [name for name in names if value in name][:5]
    if not close:
        return "ask for a parameter, an input or an operation, such as " + ", ".join(names[:3])
    return f"did you mean {', '.join(map(repr, close))}?"
