"""What a collective moves: the one answer to how many bytes."""

from __future__ import annotations

from torch import fx

from stepgraph.program.metadata import meta
from stepgraph.program.program import tensors_of


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the larger of a collective's tensors before and after, on one rank."""
    values = [meta(node)["val"], meta(node.args[0])["val"]]  # type: ignore[union-attr]
    return max(sum(t.numel() * t.element_size() for t in tensors_of(value)) for value in values)
