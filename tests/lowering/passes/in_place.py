"""What tests of passes that write in place have in common."""

from stepgraph.cost.memory import memory_timeline
from stepgraph.program.metadata import meta
from stepgraph.program.program import is_write

HEADS = ("plain", "tied", "smoothed", "capped", "z-loss", "own", "focal", "taught")
MESHES = (("dp=1", "ddp"), ("dp=2", "zero3"), ("dp=2,tp=2", "tp+zero3"))


def written(program):
    return [node for node in program.operations() if is_write(node)]


def alive_at(program, node):
    """Bytes while an operation of that name runs."""
    line = memory_timeline(program)
    (at,) = (
        at
        for n, at in zip(line.operations, line.at, strict=True)
        if meta(n)["name"] == meta(node)["name"]
    )
    return sum(at.values())
