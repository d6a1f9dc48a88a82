"""The named lowerings, best first: one that cannot execute a Program gives way to the next."""

from stepgraph.errors import UsageError, near_misses
from stepgraph.lowering.cuda_graph import CUDA_GRAPH, CUDA_GRAPH_EAGER
from stepgraph.lowering.eager import EAGER
from stepgraph.lowering.inductor import INDUCTOR, WHOLE
from stepgraph.lowering.record import Lowering

LOWERINGS: dict[str, Lowering] = {
    record.name: record for record in (CUDA_GRAPH_EAGER, CUDA_GRAPH, INDUCTOR, WHOLE, EAGER)
}


def check_lowering(name: str) -> None:
    """Raises UsageError for an unknown lowering; the message lists the known ones."""
    if name not in LOWERINGS:
        raise UsageError(f"unknown lowering {name!r}", do=near_misses(name, LOWERINGS))
