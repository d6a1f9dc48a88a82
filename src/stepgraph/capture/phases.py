"""Which operations are the forward and which the backward, where torch does not say."""

from __future__ import annotations

from torch import fx

from stepgraph.program import roles
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program

_TAGS = {"is_forward": FORWARD, "is_backward": BACKWARD}
_TANGENTS = (roles.Tangent, roles.ResultTangent)


def tagged_phase(node: fx.Node) -> str | None:
    """What torch's metadata says; None for the backward of a custom function and some views of results."""
    return _TAGS.get(str(meta(node).get("partitioner_tag")))


def settle_phases(program: Program) -> None:
    """Gives every operation a phase.

    One without a tag belongs to the backward if it reads from there, or if all that reads it is there.
    """
    roles_of = zip(program.placeholders, program.inputs, strict=True)
    late = {node for node, role in roles_of if isinstance(role, _TANGENTS)}
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
