"""Which weights that were gathered a program holds for its backward, found without what decides it."""

from __future__ import annotations

from dataclasses import replace

import stepgraph
from stepgraph import torch_internals
from stepgraph.memory.saved import saved_values
from stepgraph.planning.decisions import Table
from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program


def gathered_and_saved(program: Program) -> dict[str, int]:
    """Name -> bytes of each value that waits for the backward, is of parameters alone, and was gathered."""
    parameters = {node for role, node, _ in program.input_rows if isinstance(role, roles.Param)}
    of_weights, gathered = set(parameters), set()
    for node in program.operations():
        sources = node.all_input_nodes
        if sources and of_weights.issuperset(sources):
            of_weights.add(node)
            if node.target is torch_internals.ALL_GATHER or not gathered.isdisjoint(sources):
                gathered.add(node)
    saved = [node for node in saved_values(program, ()) if node in gathered]
    values = {meta(node)["name"]: meta(node)["val"] for node in saved}
    return {name: value.numel() * value.element_size() for name, value in values.items()}


def without_the_chain(plan: stepgraph.Plan) -> stepgraph.Plan:
    """The plan if gathers alone, and no view or cast of what they give, were computed again.

    Args:
        plan: with ``schedule="none"``, for other collectives remain.
    """
    decided = {}
    for name, decisions in plan.decisions.items():
        assert decisions.memory is not None
        recompute = decisions.memory.recompute.items()
        again = {n: block for n, block in recompute if "all_gather" in n or "wait" in n}
        decided[name] = replace(decisions, memory=replace(decisions.memory, recompute=Table(again)))
    return replace(plan, decisions=Table(decided))
