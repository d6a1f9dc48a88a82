"""What predictions ask of a Program as it is executed: what its operations read, and who holds what."""

from torch import fx

from stepgraph.cost.registers import computed_on_host
from stepgraph.cost.traffic import assign_traffic
from stepgraph.lowering.bodies import in_pieces
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensors_of


def costed(program: Program, lowering: str) -> Program:
    """The same Program: operations have their ``traffic``.

    What is compiled in pieces on the host also says in which ``piece`` each is, and which others compute
    it ``anew_in``. For a GPU that has not been compared with a run, and finding the pieces of a deep step
    takes a third of what simulating it takes.

    Args:
        program: as it is executed by that lowering.
    """
    fused = LOWERINGS[lowering].fuses
    assign_traffic(program, fused)
    made = (node for node in program.operations() if tensors_of(meta(node).get("val")))
    # What a GPU offloads is on the host as well: all has to be.
    on_host = fused and all(map(computed_on_host, made))
    if on_host and (pieces := in_pieces(program)) is not None:
        anew_in: dict[fx.Node, list[int]] = {}
        for number, node in pieces.anew:
            anew_in.setdefault(node, []).append(number)
        for node, number in pieces.piece_of.items():
            meta(node)["piece"], meta(node)["anew_in"] = number, tuple(anew_in.get(node, ()))
    return program
