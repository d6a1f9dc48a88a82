"""Results without a gradient become those of the global batch: sums, means, maxima and minima over rows.

Of any shape, in a graph without a backward. What cannot be had from what ranks have stays each rank's own,
and so does every result of a graph with an input of which it is not known whether it is rows of the batch:
so all ranks add up the same values.

reads: results, and what they are computed from. writes: ``all_reduce`` of totals. preserves: results that
are rows, or do not depend on them.
"""

from __future__ import annotations

from stepgraph.placement.losses import add_up
from stepgraph.placement.normalisation import Totals, find_totals
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape
from stepgraph.program.names import name_operations
from stepgraph.program.program import Program
from stepgraph.torch_internals import ALL_REDUCE

OWN_RESULT = "evaluate: a result is each data-parallel rank's own, numbers their mean"


def total_over_ranks(program: Program, mesh: MeshShape, totals: Totals) -> Program:
    """Adds up what results need; see the module docstring."""
    for reason in totals.apart:
        program.note(f"{OWN_RESULT}, because {reason}")
    ((mesh_dim, ranks),) = mesh.dims
    add_up(program, mesh_dim, ranks, totals.kinds, {*totals.tail, "output"})
    name_operations(program.graph)
    return program.finish()


def totals_of(program: Program, unknown: list[str], rows: int) -> Totals:
    """What to add up for a graph's results, and which of them are rows.

    Args:
        unknown: names of inputs that may be rows, or not: where there are any, nothing is added up.
        rows: of this rank's batch.
    """
    if not unknown:
        return find_totals(program, rows)
    shapes = [node.meta["val"].shape for node in program.results]
    numbers = any(not shape or shape[0] % rows for shape in shapes)
    reason = f"it is not known whether {unknown[0]} is rows of the batch"
    return Totals(apart=[reason] if numbers else [])


def whole_results(program: Program) -> dict[int, bool]:
    """Results of a graph that are no rows, whatever their shapes: of parameters alone, or added up."""
    reached = {
        node
        for node, role in zip(program.placeholders, program.inputs, strict=True)
        if isinstance(role, roles.UserInput)
    }
    for node in program.operations():
        if node.target is not ALL_REDUCE and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return {
        role.index: False
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.ModuleResult) and node not in reached
    }
