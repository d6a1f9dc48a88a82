"""Numbers that tell graphs apart: the same in every process for the same code."""

import re
import zlib
from collections.abc import Mapping, Sequence

from torch import fx

from stepgraph.program.program import Program

_HERE = re.compile(
    r" at 0x[0-9a-f]+|(?<=[a-z]):[0-9]+"
)  # addresses, and the number of a rank's device


def digest_of(programs: Mapping[str, Program]) -> int:
    """Of global programs: operations, arguments and inputs count."""
    digest = 0
    for name, program in programs.items():
        for node in program.graph.nodes:
            line = f"{name} {node.op} {node.name} {node.target} {node.args} {node.kwargs}"
            digest = zlib.crc32(_HERE.sub("", line).encode(), digest)
        roles = f"{program.inputs} {program.outputs}"
        digest = zlib.crc32(roles.encode(), digest)
    return digest


def digest_of_graph(graph: fx.Graph, sources: Sequence[str]) -> int:
    """Of one graph as this rank traced it: operations and what they read; sizes are a rank's own.

    Args:
        sources: where the inputs come from.
    """
    digest = zlib.crc32(repr(list(sources)).encode())
    for node in graph.nodes:
        line = f"{node.op} {node.target} {[n.name for n in node.all_input_nodes]}"
        digest = zlib.crc32(line.encode(), digest)
    return digest
