"""A Program as readable, Python-like text; golden tests compare it.

Values are named by their stable names, shortened where that stays unique; types are local shapes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx

from stepgraph.program import roles
from stepgraph.program.layout import MeshShape, show
from stepgraph.program.metadata import meta
from stepgraph.program.names import kernel_name

_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "b8", torch.uint8: "u8", torch.int8: "i8",
    torch.int16: "i16",
}  # fmt: skip


class Printable(Protocol):
    """What is printed of a :class:`stepgraph.program.program.Program`, which prints itself with this."""

    name: str
    inputs: list[roles.Input]
    outputs: list[roles.Output]
    mesh: MeshShape | None

    @property
    def graph(self) -> fx.Graph: ...  # noqa: D102

    @property
    def placeholders(self) -> Sequence[fx.Node]: ...  # noqa: D102

    @property
    def results(self) -> Sequence[fx.Node]: ...  # noqa: D102


def program_text(program: Printable, heading: str = "") -> str:
    """The Program, one line an operation.

    Args:
        heading: a first comment line, such as ``after place_values, 12 ms``.
    """
    names: dict[fx.Node, str] = {}
    lines = [f"# {heading}"] if heading else []
    mesh = f"  # mesh {program.mesh}" if program.mesh is not None else ""
    lines.append(f"def {program.name}({mesh}")
    for node, role in zip(program.placeholders, program.inputs, strict=True):
        names[node] = _input_name(role)
        lines.append(f"    {names[node]}: {_type(node)},  # {type(role).__name__}{_placed(node)}")
    lines.append("):")
    phase = None
    for node in program.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        names[node] = meta(node)["name"]
        if meta(node)["phase"] != phase:
            phase = meta(node)["phase"]
            lines.append(f"    # {phase}")
        lines.append(f"    {names[node]}: {_type(node)} = {_call(node, names)}{_comment(node)}")
    lines.append("    return (")
    for node, role in zip(program.results, program.outputs, strict=True):
        lines.append(f"        {names[node]},  # {roles.label(role)}")
    lines.append("    )")
    return "\n".join(lines) + "\n"


def _input_name(role: roles.Input) -> str:
    match role:
        case roles.OptimizerState(owner, key):
            return f"{owner}:{key}"
        case roles.Tangent() | roles.Seed() | roles.HostSeed():
            return type(role).__name__.lower()
        case roles.ResultTangent(index) | roles.Saved(index):
            return f"{type(role).__name__.lower()}.{index}"
        case roles.GivenGrad(name):
            return f"grad:{name}"
    return role.name


def _type(node: fx.Node) -> str:
    return _type_of(meta(node).get("val"))


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_DTYPES.get(value.dtype, value.dtype)}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_type_of(item) for item in value)})"
    return "?"


def _placed(node: fx.Node) -> str:
    placements = meta(node).get("placements") or ()
    shown = [show(p) if p is not None else "-" for p in placements]
    return f" {' '.join(shown)}" if shown else ""


def _comment(node: fx.Node) -> str:
    notes = _placed(node).strip()
    if "recomputed_from" in meta(node):
        notes = f"{notes} recomputed".strip()
    return f"  # {notes}" if notes else ""


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op == "get_attr":
        return f"constant {node.target}"

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return f"%{names[argument]}"
        if isinstance(argument, (tuple, list)):
            return f"[{', '.join(text(item) for item in argument)}]"
        # Of a device its kind: which of several a process has is its own affair.
        return argument.type if isinstance(argument, torch.device) else repr(argument)

    given = [text(argument) for argument in node.args]
    given += [f"{key}={text(value)}" for key, value in node.kwargs.items()]
    return f"{kernel_name(node)}({', '.join(given)})"
