"""Gives each reader a view of its own, so that what is viewed can be moved once for all of them."""

from stepgraph.operators.views import REARRANGES
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import OPTIMIZER, Program
from stepgraph.program.record import program_pass


@program_pass(
    reads="views with several readers",
    writes="a copy of the view for each reader but the first, right before it",
)
def copy_views(program: Program, views_apart: bool) -> Program:
    """One view for each reader; see the module docstring."""
    if not views_apart:
        return program
    results = set(program.results)
    for node in reversed(list(program.operations())):
        if node.target not in REARRANGES or node in results or meta(node)["phase"] == OPTIMIZER:
            continue
        for reader in list(node.users)[1:]:
            with program.graph.inserting_before(reader):
                copy = program.graph.node_copy(node)
            unnamed = {key: v for key, v in meta(node).items() if key != "name"}
            set_meta(copy, unnamed | {"phase": meta(reader)["phase"]})
            reader.replace_input_with(node, copy)
    return program.finish()
