"""Where the update may start with each value that it reads of the backward.

Behind the next collective after the one that the value comes from: that is on its way by then, and the work
between has hidden the first.
"""

import itertools

from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.views import PARTS_OF_A_RESULT
from stepgraph.planning.decisions import Table
from stepgraph.program.collectives import is_collective
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program
from stepgraph.torch_internals.code import inputs_of


def find_updates(program: Program) -> Table[str, str]:
    """Values of a placed Program that the update reads -> the operation behind which it may start."""
    operations = list(program.operations())
    position = {node: i for i, node in enumerate(operations)}
    others = [node for node in operations if meta(node)["phase"] != OPTIMIZER]
    place = _awaited(others, position)
    return Table(
        {
            meta(node)["name"]: meta(operations[place[node]])["name"]
            for node in others
            if any(meta(user).get("phase") == OPTIMIZER for user in node.users)
        }
    )


def _awaited(operations: list[fx.Node], position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Where each result is there without waiting: a collective's, where the next has started."""
    collectives = [node for node in operations if is_collective(node)]
    following = dict(itertools.pairwise(collectives))
    place: dict[fx.Node, int] = {}
    for node in operations:
        source = next(iter(inputs_of(node)), None)
        if node.target is torch_internals.WAIT:
            place[node] = position[following.get(source, node)]  # type: ignore[arg-type]
        elif node.target in PARTS_OF_A_RESULT and source in place:
            place[node] = max(place[source], position[node])
        else:
            place[node] = position[node]
    return place
