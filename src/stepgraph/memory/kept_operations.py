"""Policy ``ops``: of each block, which operations' results are kept, while the rest is computed again.

Those that are dear for their size: attention, and every other product of matrices, as in torchtitan's
selective checkpointing. Also the first sum of a block with what the block was given (a residual): without
it, what reads that sum would be computed again from the start of the block.
"""

from collections.abc import Sequence

import torch
from torch import fx

from stepgraph.cost.work import family_of, node_flops
from stepgraph.operators.views import viewed
from stepgraph.program.metadata import meta
from stepgraph.program.program import tensor_arguments

aten = torch.ops.aten


def kept_operations(block: Sequence[fx.Node]) -> set[fx.Node]:
    """Operations of a block of the forward whose results are kept."""
    dear = [node for node in block if node_flops(node)]
    attention = {node for node in dear if family_of(node.target).startswith("attention")}
    products = [node for node in dear if node not in attention]
    return attention | {*products[::2]} | {*first_residual(block)}


def first_residual(block: Sequence[fx.Node]) -> list[fx.Node]:
    """The first sum of what the block made and what it was given; none in some blocks."""
    inside = {*block}
    for node in block:
        if node.target is not aten.add.Tensor:
            continue
        terms = [_shown(term) for term in tensor_arguments(node)]
        size = meta(node)["val"].numel()
        alike = all(meta(term)["val"].numel() == size for term in tensor_arguments(node))
        if len(terms) == 2 and alike and (terms[0] in inside) != (terms[1] in inside):
            return [node]
    return []


def _shown(node: fx.Node) -> fx.Node:
    """What a view shows."""
    while (source := viewed(node)) is not None:
        node = source
    return node
