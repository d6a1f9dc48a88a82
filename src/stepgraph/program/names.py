"""Stable names: module path + operation, the same on every rank, device and re-capture.

``layers.3.self_attn.q_proj/mm`` is the product of that projection; a second one in the same module
and phase is ``.../mm.1``; the backward's operations carry ``.backward``, the optimizer's
``.optimizer``. Kernels that devices choose differently share one name (``attention``).
"""

import re
from collections import Counter

from torch import fx

from stepgraph.program.metadata import meta

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"  # the phases of a step

# Operation names that differ between devices or traces but mean the same.
_SAME_OPERATION = {
    "_unsafe_view": "view",
    "reshape": "view",
    "_to_copy": "to",
    "addmm": "mm",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "keyed_attention": "attention",
    "attention_bias_backward": "attention_backward",
}
_ATTENTION = re.compile(r"_?scaled_dot_product_\w*?attention\w*?(_backward)?$")


def operation_name(node: fx.Node) -> str:
    """The operation of a node in stable words: ``mm``, ``attention``, ``getitem``."""
    target = node.target
    if node.op in ("placeholder", "get_attr"):
        return str(target)
    schema = getattr(target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else target.__name__  # type: ignore[union-attr]
    if match := _ATTENTION.fullmatch(name):
        return "attention" + (match.group(1) or "")
    return _SAME_OPERATION.get(name, name)


def kernel_name(node: fx.Node) -> str:
    """:func:`operation_name`, and of an attention the kernel: ``flash_attention``, ``attention``."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else ""
    if _ATTENTION.fullmatch(name) or name == "keyed_attention":
        return name.removeprefix("_scaled_dot_product_")
    return operation_name(node)


def name_operations(graph: fx.Graph) -> None:
    """Gives every unnamed operation its stable name, in graph order."""
    unnamed = [
        node
        for node in graph.nodes
        if node.op in ("call_function", "get_attr") and "name" not in meta(node)
    ]
    if not unnamed:
        return
    taken = {meta(node)["name"] for node in graph.nodes if "name" in meta(node)}
    counts: Counter[str] = Counter()
    for node in unnamed:
        base = f"{meta(node).get('module', '')}/{operation_name(node)}".lstrip("/")
        phase = meta(node).get("phase", FORWARD)
        if phase != FORWARD:
            base = f"{base}.{phase}"
        name = base
        while name in taken:
            counts[base] += 1
            name = f"{base}.{counts[base]}"
        taken.add(name)
        meta(node)["name"] = name
