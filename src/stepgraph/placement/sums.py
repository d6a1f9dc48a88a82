"""What a graph adds up over ranks: a loss that it makes of its rows, and results that no gradient comes to.

Ranks are to a graph what micro-batches are to a step: the totals behind a loss (a mean over elements, a sum
and its count) are added up over ranks, and what follows from them is computed on the sum. So are sums,
means, maxima and minima of any shape without a gradient. What cannot be had from what ranks have is each
rank's own, and so is a loss that a later graph makes of it.

Where it is not known whether an input is rows of the batch, its shape says so for a loss and the numbers
beside it; without a loss nothing is added up. Ranks decide alike, as they run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Replicate

from stepgraph.placement.normalisation import find_normalisation, find_totals
from stepgraph.placement.numbers import MAY_COUNT_ROWS, counts_rows
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.layout import Apart, Spread
from stepgraph.program.program import Program

OWN_LOSS = "loss: the mean over data-parallel ranks of each one's own"
OWN_RESULT = "evaluate: a result is each data-parallel rank's own, numbers their mean"


@dataclass
class Sums:
    """What a graph adds up over ranks, and how ranks have its results then.

    Attributes:
        loss: the result that is the global batch's loss, and how it adds up.
        totals: names of values behind other results and how they add up, in graph order.
        tail: names of the operations that read those added up.
        results: results by index, as far as it is known.
        notes: what is each rank's own, and why.
    """

    loss: tuple[roles.ModuleResult, Normalisation] | None = None
    totals: dict[str, str] = field(default_factory=dict)
    tail: set[str] = field(default_factory=set)
    results: dict[int, Spread] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def decide_sums(
    program: Program,
    rows: int,
    spread: Mapping[roles.Input, Spread] | None = None,
    unknown: Sequence[str] = (),
) -> Sums:
    """Reads off a graph's Program what it adds up.

    Args:
        rows: of this rank's batch.
        spread: how ranks have the inputs of which that is known.
        unknown: names of the others.
    """
    spread = spread or {}
    alike = _alike(program, spread)
    losses = [
        role
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.ModuleResult)
        and node.meta["val"].dim() == 0
        and role.index not in alike
        and roles.ResultTangent(role.index) in program.inputs
    ]
    found = _normalisation(program, losses, rows, spread) if losses else None
    why_none = f"it is not known whether {unknown[0]} is rows of the batch" if unknown else ""
    if found is not None:
        why_none = "" if found.exact else "the loss beside it is each rank's own"
    totals = find_totals(program, rows, spread, why_none)
    sums = Sums(None, totals.kinds, totals.tail, totals.results)
    if unknown:
        sums.results = alike
    if found is not None and found.exact:
        sums.loss = losses[0], found
        sums.results[losses[0].index] = Replicate()
    elif found is not None:
        sums.notes.append(f"{OWN_LOSS}, because {found.reason}")
    if not any(isinstance(role, roles.ResultTangent) for role in program.inputs):
        apart = [state.reason for state in sums.results.values() if isinstance(state, Apart)]
        shapes = [node.meta["val"].shape for node in program.results]
        if unknown and any(not shape or shape[0] % rows for shape in shapes):
            apart = [why_none]
        sums.notes += [f"{OWN_RESULT}, because {reason}" for reason in dict.fromkeys(apart)]
    return sums


def _normalisation(
    program: Program,
    losses: list[roles.ModuleResult],
    rows: int,
    spread: Mapping[roles.Input, Spread],
) -> Normalisation:
    """How the loss adds up; a graph has no other rows for its numbers to be held against."""
    tangent = roles.ResultTangent(losses[0].index)
    found = find_normalisation(program, losses[0], tangent, rows, spread)
    numbers = [number for literals in found.numbers.values() for number in literals]
    if len(losses) > 1:
        found.exact, found.reason = False, "a graph makes several losses"
    elif any(found.gradient_kind == "sum" or counts_rows(number, rows) for number in numbers):
        found.exact, found.reason = False, MAY_COUNT_ROWS
    return found


def _alike(program: Program, spread: Mapping[roles.Input, Spread]) -> dict[int, Spread]:
    """Results that all ranks have alike: of parameters, or of inputs that are."""
    reached = {
        node
        for node, role in zip(program.placeholders, program.inputs, strict=True)
        if isinstance(role, roles.UserInput) and not isinstance(spread.get(role), Replicate)
    }
    for node in program.operations():
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return {
        role.index: Replicate()
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.ModuleResult) and node not in reached
    }
