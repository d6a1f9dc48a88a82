"""A number that tells Programs apart: of what they compute, not of where a process keeps it."""

import re
import zlib
from collections.abc import Mapping

from stepgraph.program.program import Program

_HERE = re.compile(
    r" at 0x[0-9a-f]+|(?<=[a-z]):[0-9]+"
)  # addresses, and the number of a rank's device


def digest_of(programs: Mapping[str, Program]) -> int:
    """The same in every process for the same programs; operations, arguments and inputs count."""
    digest = 0
    for name, program in programs.items():
        for node in program.graph.nodes:
            line = f"{name} {node.op} {node.name} {node.target} {node.args} {node.kwargs}"
            digest = zlib.crc32(_HERE.sub("", line).encode(), digest)
    return digest
