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
    reads="``adds_pieces``: sums over what is computed some rows at a time",
    writes="``add_`` and ``addmm_``, without the cast of what is added",
    functional=False,
)
def add_up_in_place(program: Program) -> Program:
    """Adds to the sum so far where it lies, where nobody else reads it.

    Each piece is a call of one compiled body, which cannot know that what it is given is not read again.
    """
    results = {*program.results}
    for node in list(program.operations()):
        if "adds_pieces" in meta(node) and _is_sum_so_far(node.args[0], node, results):
            node.target = _IN_PLACE[node.target]
            if node.target is aten.add_.Tensor:
                _without_cast(program, node)
    return program.finish()


def _is_sum_so_far(total: Any, node: fx.Node, results: set[fx.Node]) -> bool:
    """Whether a sum that is added to is read by that alone, and is memory of its own.

    A cast is that of what is: one that leads back to its type, and a cat, a compiler may leave out.
    """
    if {*total.users} != {node} or node.args.count(total) > 1 or total in results:
        return False
    if "adds_pieces" in meta(total):
        return True
    source = total.all_input_nodes[0] if total.target is TO_COPY else total
    own = source.target in OWN_MEMORY or operators.of(source.target).reduces
    return own and (source is total or meta(source)["val"].dtype != meta(total)["val"].dtype)


def _without_cast(program: Program, node: fx.Node) -> None:
    """What is added is cast as it is read."""
    total, cast, *_ = node.args
    if cast.target is not TO_COPY or len(cast.users) > 1:  # type: ignore[union-attr]
        return
    source, dtype = cast.all_input_nodes[0], meta(total)["val"].dtype  # type: ignore
    here = source.op == "call_function"  # nobody writes into it
    if here and torch.promote_types(dtype, meta(source)["val"].dtype) == dtype:
        node.replace_input_with(cast, source)  # type: ignore[arg-type]
        program.graph.erase_node(cast)  # type: ignore[arg-type]
