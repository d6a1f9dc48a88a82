"""What torch's metadata says of a captured operation, in the words of a Program."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from stepgraph.capture.phases import tagged_phase
from stepgraph.program.program import Value


def value_of(node: fx.Node | None) -> Value:
    """Shape and type of a node's result; those of a number where it is no tensor."""
    tensor = None if node is None else node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return Value((), torch.float32)
    return Value(tuple(tensor.shape), tensor.dtype)


# How dynamo spells a submodule that Python reached through ``__getattr__`` (peft's wrappers do).
_STORED_MODULE = re.compile(r"\.__dict__\['_modules'\]\['([^']+)'\]")


def annotate(node: fx.Node, root: re.Pattern) -> None:
    """Keeps of torch's metadata what the Program promises, and drops the rest.

    Args:
        root: how dynamo's path of a submodule begins.
    """
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    path = _STORED_MODULE.sub(r".\1", path)
    kept: dict[str, Any] = {"val": meta.get("val")}
    if "name" in meta:
        kept["name"] = meta["name"]
    if node.op in ("call_function", "get_attr"):
        kept["phase"] = tagged_phase(node)
        kept["module"] = root.sub("", path) if root.match(path) else ""
        if meta.get("stack_trace"):
            kept["source"] = _source_line(meta["stack_trace"])
        if "recompute" in meta and "RECOMPUTE" in str(meta["recompute"]):
            kept["checkpoint"] = meta.get("ac_graph_id", 0)
    node.meta = kept


def _source_line(stack_trace: str) -> str:
    """``file.py:12 in forward: y = self.l(x)`` of the innermost frame."""
    lines = [line.strip() for line in stack_trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if match := re.match(r'File "(.*?)", line (\d+), in (\w+)', lines[index]):
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{match[1].rsplit('/', 1)[-1]}:{match[2]} in {match[3]}: {code}"
    return ""
