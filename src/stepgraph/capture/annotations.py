"""What torch's metadata says of a captured operation, in the words of a Program."""

import re
from typing import Any

from torch import fx

from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.torch_internals.kept import PLANNED

# How dynamo spells a submodule that Python reached through ``__getattr__`` (peft's wrappers do).
_STORED_MODULE = re.compile(r"\.__dict__\['_modules'\]\['([^']+)'\]")


# What is not in it is told by settle_phases: the backward of a custom function, some views of results.
_TAGS = {"is_forward": FORWARD, "is_backward": BACKWARD}
_TANGENTS = (roles.Tangent, roles.ResultTangent)


def annotate(node: fx.Node, root: re.Pattern) -> None:
    """Keeps of torch's metadata what the Program promises, and drops the rest.

    Args:
        root: how dynamo's path of a submodule begins.
    """
    metadata = node.meta
    stack = metadata.get("nn_module_stack") or metadata.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    path = _STORED_MODULE.sub(r".\1", path)
    kept: dict[str, Any] = {"val": metadata.get("val")}
    if "name" in metadata:
        kept["name"] = metadata["name"]
    if node.op in ("call_function", "get_attr"):
        kept["phase"] = _TAGS.get(str(metadata.get("partitioner_tag")))
        kept["module"] = root.sub("", path) if root.match(path) else ""
        if metadata.get("stack_trace"):
            kept["source"] = source_line(metadata["stack_trace"])
        if "seq_nr" in metadata:
            kept["sequence"] = metadata["seq_nr"]
        if metadata.get("recompute") is not None:
            kept["checkpoint"] = metadata.get("ac_graph_id", PLANNED)
            kept["region_policy"] = metadata["recompute"].name.lower()
    node.meta = kept


def source_line(stack_trace: str) -> str:
    """``file.py:12 in forward: y = self.l(x)`` of the innermost frame."""
    lines = [line.strip() for line in stack_trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if match := re.match(r'File "(.*?)", line (\d+), in (\w+)', lines[index]):
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{match[1].rsplit('/', 1)[-1]}:{match[2]} in {match[3]}: {code}"
    return ""


def settle_phases(program: Program) -> None:
    """Gives every operation a phase.

    One without a tag belongs to the backward if it reads from there, or if all that reads it is there.
    """
    late = {node for role, node, _ in program.input_rows if isinstance(role, _TANGENTS)}
    nodes = [node for node in program.graph.nodes if "phase" in meta(node)]
    for node in nodes:
        untold = meta(node)["phase"] is None
        if meta(node)["phase"] == BACKWARD or (
            untold and not late.isdisjoint(node.all_input_nodes)
        ):
            late.add(node)
    for node in reversed(nodes):
        computed = node.op == "call_function" and bool(node.users)
        if meta(node)["phase"] is None and computed and late.issuperset(node.users):
            late.add(node)
        meta(node)["phase"] = meta(node)["phase"] or (BACKWARD if node in late else FORWARD)
