"""How ranks have what a graph makes of the batch, and what it adds up over them.

Ranks are to a graph what micro-batches are to a step. A sum or mean over a rank's rows stays pending, and
how it is pending is remembered with the value: whoever needs it whole adds it up. That is a graph whose
loss is computed of totals (a sum over its count), be they its own or those of a graph before it, or who
hands a result to the user; in an evaluation it is every graph that computes of totals, or of what one
before it left pending. So a graph in training adds up nothing that a rank may make alone, such as a metric
that it logs, and code between graphs finds a rank's own sums, never those of all beside its own numbers.

What cannot be had from what ranks have is each rank's own, and so is what a later graph makes of it, of
inputs of which it is not known how ranks have them (numbers and vectors that code between graphs makes, or
a graph by counting rows; what has a row for each of the batch is taken for rows), or of a sum and numbers
that Python hands to a graph, which may be a rank's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from stepgraph.analysis.loss_normalisation import Totals, find_normalisation, find_totals
from stepgraph.analysis.rows import (
    MAY_COUNT_ROWS,
    NOTHING_GIVEN,
    Given,
    counts_rows,
    drawn_for_rows,
    numbers_in,
    reached,
    takes_given,
)
from stepgraph.operators.views import storage_roots
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.layout import Apart, Spread
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM

OWN_LOSS = "loss: the mean over data-parallel ranks of each one's own"
OWN_NUMBERS = (
    f"{OWN_LOSS}, as far as it is made of numbers that code reads from tensors (.item(), .tolist(), "
    "how many are selected)"
)
OWN_SUMS = (
    "sums: those over rows that code between graphs reads are each data-parallel rank's own there, "
    "and so is what it makes of them"
)
OWN_RESULT = (
    "evaluate: a result is each data-parallel rank's own, floating-point numbers their mean"
)


@dataclass
class Sums:
    """What a graph adds up over ranks, and how ranks have its results then.

    Attributes:
        loss: the result that is the global batch's loss, and how it adds up.
        totals: names of values behind other results and how they add up, in graph order.
        tail: names of the operations that read those added up.
        results: results by index, as far as it is known.
        written: inputs that have new values, by position.
        notes: what is each rank's own, and why.
    """

    loss: tuple[roles.ModuleResult, Normalisation] | None = None
    totals: dict[str, str] = field(default_factory=dict)
    tail: set[str] = field(default_factory=set)
    results: dict[int, Spread] = field(default_factory=dict)
    written: dict[int, Spread | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def exchanged(self) -> str:
        """What ranks exchange for it, now or when results are handed out; all must mean the same."""
        partial = {i: how for i, how in self.results.items() if isinstance(how, Partial)}
        later = {i: how.reduce_op for i, how in partial.items() if how.reduce_op != "avg"}
        return repr((self.loss and self.loss[1].totals, self.totals, sorted(later.items())))


def decide_sums(
    program: Program,
    rows: int,
    spread: Mapping[roles.Input, Spread] | None = None,
    unknown: Sequence[str] = (),
    evaluates: bool = False,
    given: Given = NOTHING_GIVEN,
) -> Sums:
    """Reads off a graph's Program what it adds up.

    Args:
        rows: of this rank's batch.
        spread: how ranks have the inputs of which that is known.
        unknown: names of the others.
        evaluates: results are to be those of the global batch, no loss is trained.
        given: numbers that Python's code had for the graph.
    """
    spread = spread or {}
    alike, unsure = _constant(program, rows, spread)
    results = {
        role: node for role, node, _ in program.output_rows if isinstance(role, roles.ModuleResult)
    }
    losses = [
        role
        for role, node in results.items()
        if meta(node)["val"].dim() == 0
        and role.index not in alike
        and roles.ResultTangent(role.index) in program.inputs
    ]
    if unknown:
        why = f"it is not known whether {unknown[0]} is rows of the batch"
        shapes = {role: meta(node)["val"].shape for role, node in results.items()}
        numbers = [role for role, shape in shapes.items() if not shape or shape[0] % rows]
        own: dict[int, Spread] = {
            role.index: Apart(why) for role in (numbers if evaluates else losses)
        }
        notes = [f"{OWN_RESULT}, because {why}"] if evaluates and numbers else []
        return Sums(results=own | alike, notes=notes)
    totals = find_totals(program, rows, spread, evaluates, given)
    takes = any(takes_given(program, node, given) for node in results.values())
    if evaluates and _has_own(totals) and not takes:
        whole = _of_whole_inputs(program, rows, spread, given)
        totals = totals if whole is None or _has_own(whole) else whole
    known = {i: how for i, how in totals.results.items() if i not in unsure}
    sums = Sums(None, totals.kinds, totals.tail, known)
    for loss in losses:
        found = _normalisation(program, loss, rows, spread)
        pending = list(found.totals) == [meta(results[loss])["name"]]
        if not found.exact:
            sums.results[loss.index] = Apart(found.reason)
        elif pending:
            sums.results[loss.index] = Partial(found.gradient_kind)
        elif len(losses) > 1:
            sums.results[loss.index] = Apart("a graph makes several losses")
        else:
            sums.loss = loss, found
            names = {role: meta(node)["name"] for role, node in results.items()}
            whole = [role for role, name in names.items() if name in found.tail]
            sums.results |= {role.index: Replicate() for role in whole}
    if evaluates:
        apart = [state.reason for state in sums.results.values() if isinstance(state, Apart)]
        sums.notes = [f"{OWN_RESULT}, because {reason}" for reason in dict.fromkeys(apart)]
    return sums


def _of_whole_inputs(
    program: Program, rows: int, spread: Mapping[roles.Input, Spread], given: Given
) -> Totals | None:
    """Where what earlier graphs left pending is added up as it comes in: rows can be computed with it."""
    pending = {role: how.reduce_op for role, how in spread.items() if isinstance(how, Partial)}
    if not pending:
        return None
    whole = {**spread, **dict.fromkeys(pending, Replicate())}
    totals = find_totals(program, rows, whole, True, given, waits=False)
    nodes = {program.input_node(role): kind for role, kind in pending.items()}
    totals.kinds = {meta(node)["name"]: kind for node, kind in nodes.items()} | totals.kinds
    readers = (user for node in nodes for user in node.users)
    totals.tail |= {meta(user)["name"] for user in readers if user.op != "output"}
    root = storage_roots(program)
    for role, result, _ in program.output_rows:
        if isinstance(role, roles.ModuleResult) and (kind := nodes.get(root[result])):
            # Its caller gets a view of what it gave, which nobody has added up.
            totals.results[role.index] = Partial(kind)
    return totals


def _has_own(totals: Totals) -> bool:
    return any(isinstance(how, Apart) for how in totals.results.values())


def _normalisation(
    program: Program, loss: roles.ModuleResult, rows: int, spread: Mapping[roles.Input, Spread]
) -> Normalisation:
    """How a loss adds up; a graph has no other rows for its numbers to be held against."""
    found = find_normalisation(program, loss, roles.ResultTangent(loss.index), rows, spread)
    numbers = [number for literals in found.numbers.values() for number in literals]
    if any(found.gradient_kind == "sum" or counts_rows(number, rows) for number in numbers):
        found.exact, found.reason = False, MAY_COUNT_ROWS
    return found


def _constant(
    program: Program, rows: int, spread: Mapping[roles.Input, Spread]
) -> tuple[dict[int, Spread], set[int]]:
    """Results that nothing of the batch goes into: those that all ranks have alike, and the others.

    What a graph makes of nothing and has as many rows as the batch, or is made of a number that may count
    them, is not known to be alike, as what code between graphs makes.
    """
    given = {node: role for role, node, _ in program.input_rows}
    kinds = (roles.Param, roles.Buffer, roles.Outside)
    held = {node for node, role in given.items() if isinstance(role, kinds)}
    inputs = {node for node, role in given.items() if isinstance(role, roles.UserInput)}
    batch = {node for node in inputs if not isinstance(spread.get(given[node]), Replicate)}
    drawn = {
        node
        for node in program.operations()
        if node.target is RANDOM and drawn_for_rows(program, node, rows)
    }
    varies, computed = reached(program, batch | drawn), reached(program, inputs | held)
    made = {
        node
        for node in program.operations()
        if node not in computed and _may_be_of_rows(program, node, rows)
    }
    unsure = reached(program, made)
    results = {
        role.index: node
        for role, node, _ in program.output_rows
        if isinstance(role, roles.ModuleResult) and node not in varies
    }
    alike: dict[int, Spread] = {i: Replicate() for i, node in results.items() if node not in unsure}
    return alike, results.keys() - alike.keys()


def _may_be_of_rows(program: Program, node: fx.Node, rows: int) -> bool:
    value = meta(node)["val"]
    if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,):
        return True
    behind = [node, *node.all_input_nodes]
    return any(counts_rows(number, rows) for n in behind for number in numbers_in(program, n))
