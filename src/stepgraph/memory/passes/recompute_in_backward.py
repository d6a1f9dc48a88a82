"""Applies a memory decision: what is not kept is computed again in the backward."""

from torch import fx
from torch.fx.node import map_arg

from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.program.record import program_pass
from stepgraph.torch_internals.code import copy_node, inputs_of

_OF_THE_ORIGINAL = {"name", "checkpoint", "region_policy", "sequence"}


@program_pass(
    reads="the stable names in a :class:`MemoryDecision`",
    writes=(
        "copies of forward operations, in the backward phase, right before their first "
        "reader; a copy is shared by all readers in the backward. "
        "``recomputed_from`` names the original"
    ),
)
def recompute_in_backward(program: Program, decision: MemoryDecision) -> Program:
    """Duplicates what the decision does not keep; see the module docstring."""
    dropped = {
        node for node in program.operations(FORWARD) if meta(node)["name"] in decision.recompute
    }
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(program.operations(BACKWARD)):
        if missing := [source for source in inputs_of(node) if source in dropped]:
            for source in missing:
                _copy_before(program.graph, source, node, dropped, copies)
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda a: copies.get(a, a))
    for note in decision.notes:
        program.note(note)
    return program.finish()


def _copy_before(
    graph: fx.Graph,
    value: fx.Node,
    reader: fx.Node,
    dropped: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Copies ``value`` and the dropped values it needs, sources first, before ``reader``."""
    stack = [value]
    while stack:
        node = stack[-1]
        needed = [s for s in inputs_of(node) if s in dropped and s not in copies]
        if node in copies:
            stack.pop()
        elif needed:
            stack += needed
        else:
            stack.pop()
            with graph.inserting_before(reader):
                copy = copy_node(graph, node, lambda a: copies.get(a, a))
            kept = {k: v for k, v in meta(node).items() if k not in _OF_THE_ORIGINAL}
            again = {"phase": BACKWARD, "recomputed_from": meta(node)["name"]}
            set_meta(copy, kept | again)
            copies[node] = copy
