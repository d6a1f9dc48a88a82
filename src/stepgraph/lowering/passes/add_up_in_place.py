"""Sums over pieces of rows are added up in one memory."""

from typing import Any

import torch
from torch import fx

from stepgraph.lowering.bodies import OWN_MEMORY
from stepgraph.operators import table as operators
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.record import program_pass
from stepgraph.torch_internals.operators import TO_COPY

aten = torch.ops.aten

_IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.addmm.default: aten.addmm_.default,
}


@program_pass(
    reads="``rows_piece``: what is computed some rows at a time",
    writes="``add_`` and ``addmm_``, without the cast of what is added",
    functional=False,
)
def add_up_in_place(program: Program) -> Program:
    """Adds to the sum so far where it lies, where nobody else reads it.

    Each piece is a call of one compiled body, which cannot know that what it is given is not read again.
    """
    results = {*program.results}
    for node in list(program.operations()):
        adds = "rows_piece" in meta(node) and node.target in _IN_PLACE
        if adds and _is_sum_so_far(node, results):
            node.target = _IN_PLACE[node.target]
            if node.target is aten.add_.Tensor:
                _without_cast(program, node)
    return program.finish()


def _is_sum_so_far(node: fx.Node, results: set[fx.Node]) -> bool:
    """Whether an addition is the only one to read its first operand, which is memory of its own."""
    total = node.args[0]
    if not isinstance(total, fx.Node) or total.op != "call_function" or total in results:
        return False
    same = meta(total)["val"].shape == meta(node)["val"].shape
    alike = same and meta(total)["val"].dtype == meta(node)["val"].dtype
    alone = {*total.users} == {node} and node.args.count(total) == 1
    return alike and alone and _is_memory_of_its_own(total)


def _is_memory_of_its_own(total: fx.Node) -> bool:
    """Whether every lowering allocates it, and for this sum."""
    if "rows_piece" not in meta(total):
        return False
    if total.target is TO_COPY:
        return meta(total.all_input_nodes[0])["val"].dtype != meta(total)["val"].dtype
    known = operators.of(total.target)
    return known.reduces or total.target in OWN_MEMORY or total.target in _IN_PLACE.values()


def _without_cast(program: Program, node: fx.Node) -> None:
    """What is added is cast as it is read."""
    total, cast, *_ = node.args
    if not isinstance(cast, fx.Node) or cast.target is not TO_COPY or len(cast.users) > 1:
        return
    source = cast.all_input_nodes[0]
    dtype = meta(total)["val"].dtype  # type: ignore[arg-type]
    if torch.promote_types(dtype, meta(source)["val"].dtype) == dtype == meta(cast)["val"].dtype:
        node.replace_input_with(cast, source)
        program.graph.erase_node(cast)
