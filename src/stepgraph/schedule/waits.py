"""Before which operation each collective completes: its first reader.

Where only one collective may be in flight, it also completes before the next one starts; and what is
computed in pieces of rows so that the whole is never there has one of each kind in flight.
"""

from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.views import PARTS_OF_A_RESULT
from stepgraph.planning.decisions import Table
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.torch_internals.kept import PLANNED

MOVED = {torch_internals.WAIT, *PARTS_OF_A_RESULT}


def find_waits(program: Program, overlaps: bool) -> Table[str, str]:
    """Waits of a Program, without those that a plan has decided before -> what each completes before."""
    found: dict[str, str] = {}
    point: dict[fx.Node, fx.Node] = {}  # what is moved -> what it goes right before
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    later: dict[fx.Node, fx.Node] = {}  # collectives of pieces -> the next one of their kind
    alike: dict[object, fx.Node] = {}
    for node in filter(is_collective, reversed(list(program.operations()))):
        if "rows_piece" in meta(node):
            if node.target in alike:
                later[node] = alike[node.target]
            alike[node.target] = node
    for node, following in moved_last_first(program):
        if meta(node).get("checkpoint") == PLANNED:
            continue
        readers = [point.get(user, user) for user in node.users]
        first = min(readers, key=position.__getitem__, default=None)
        if following is not None and not overlaps and node.target is torch_internals.WAIT:
            first = min(following, first or following, key=position.__getitem__)
        if (beyond := later.get(node.all_input_nodes[0])) is not None:
            first = min(beyond, first or beyond, key=position.__getitem__)
        if first is None or first.op != "call_function" or first is node.next:
            continue
        point[node] = first
        if node.target is torch_internals.WAIT:
            found[meta(node)["name"]] = meta(first)["name"]
    return Table(found)


def moved_last_first(program: Program) -> list[tuple[fx.Node, fx.Node | None]]:
    """Waits, and the slices behind them, from the last on; each with the next collective behind it."""
    found: list[tuple[fx.Node, fx.Node | None]] = []
    following: fx.Node | None = None
    for node in reversed(list(program.operations())):
        if is_collective(node):
            following = node
        elif node.target is torch_internals.WAIT or (
            node.target in MOVED and node.all_input_nodes[0].target in MOVED
        ):
            found.append((node, following))
    return found
