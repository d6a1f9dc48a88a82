"""Effects in a captured graph: operations that return nothing, kept in order by tokens."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._higher_order_ops import effects as torchs
from torch._higher_order_ops.effects import with_effects

from stepgraph.torch_internals import descriptors

# They raise where a result (of ``torch.linalg.solve``, say) does not exist, and compute nothing.
_CHECKS = {"aten._linalg_check_errors.default"}


@contextlib.contextmanager
def keeping_checks() -> Iterator[None]:
    """Lets a joint graph have the checks of results, which older releases (2.11) lose without a word."""
    check = "aten::_linalg_check_errors"
    if torchs._get_effect(check) is not None:
        yield
        return
    kept = torchs._register_effectful_op(check, torchs._EffectType.ORDERED)
    try:
        yield
    finally:
        kept.destroy()


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
    inputs, outputs = descriptors(joint)
    kept = [(result, about) for result, about in outputs if not _is_token(about)]
    output = joint.graph.output_node()
    output.args = ([result for result, _ in kept],)
    output.meta["desc"] = [about for _, about in kept]
    for node, about in inputs:
        if _is_token(about):
            joint.graph.erase_node(node)


def _is_token(descriptor: Any) -> bool:
    return "Token" in type(descriptor).__name__
