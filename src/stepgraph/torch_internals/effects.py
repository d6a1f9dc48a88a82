"""Effects in a captured graph: operations that return nothing, kept in order by tokens."""

from __future__ import annotations

from torch import fx
from torch._higher_order_ops.effects import with_effects
from torch.utils import _pytree as pytree

# They raise where a result (of ``torch.linalg.solve``, say) does not exist, and compute nothing.
_CHECKS = {"aten._linalg_check_errors.default"}


def drop_checks(joint: fx.GraphModule) -> list[str]:
    """Takes checks of results out of a joint graph, with their tokens; says whose they were.

    Any other effect stays, and with it the token that nothing describes.
    """
    checked = []
    for node in list(joint.graph.nodes):
        if node.target is with_effects and str(node.args[1]) in _CHECKS:
            checked.append(str(node.args[3]))
            for result in list(node.users):
                result.replace_all_uses_with(node.args[0])
                joint.graph.erase_node(result)
            joint.graph.erase_node(node)
    if checked and not any(node.target is with_effects for node in joint.graph.nodes):
        _drop_tokens(joint)
    return checked


def _drop_tokens(joint: fx.GraphModule) -> None:
    output = joint.graph.output_node()
    flat = pytree.tree_leaves(output.args[0], is_leaf=lambda result: result is None)
    rows = [
        (result, about)
        for result, about in zip(flat, output.meta["desc"], strict=True)
        if "Token" not in type(about).__name__
    ]
    output.args = ([result for result, _ in rows],)
    output.meta["desc"] = [about for _, about in rows]
    for node in list(joint.graph.nodes):
        if node.op == "placeholder" and "Token" in type(node.meta["desc"]).__name__:
            joint.graph.erase_node(node)
