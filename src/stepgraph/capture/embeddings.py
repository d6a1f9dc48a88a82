"""Embeddings whose table is no parameter like others: sparse gradients, rows that are renormalised."""

import inspect
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from stepgraph.capture.annotations import source_line
from stepgraph.errors import CaptureError
from stepgraph.torch_internals.export import module_path, stack_trace

CALLS = {
    functional.embedding: inspect.signature(functional.embedding),
    functional.embedding_bag: inspect.signature(functional.embedding_bag),
}
# The operator, called by its own name: (weight, indices, padding_idx, scale_grad_by_freq, sparse).
_SPARSE_IN_OPERATOR = 4
DENSE = (
    "Embedding(sparse=True): gradients are dense, the same numbers; a step updates the whole table"
)


def settle(graph: fx.Graph) -> bool:
    """Gives the embeddings of a graph of dynamo's dense gradients.

    Returns:
        whether any had sparse ones.

    Raises:
        CaptureError: one renormalises its table.
    """
    any_sparse = False
    for node in graph.nodes:
        if node.target in CALLS:
            given = CALLS[node.target].bind(*node.args, **node.kwargs).arguments
            if given.get("max_norm") is not None:
                raise _renormalises(node, given["max_norm"])
            if given.get("sparse"):
                any_sparse = True
                _say_dense(node)
        elif node.target is torch.embedding and any(node.args[_SPARSE_IN_OPERATOR:]):
            any_sparse = True
            node.args = node.args[:_SPARSE_IN_OPERATOR]
    return any_sparse


def _say_dense(node: fx.Node) -> None:
    position = list(CALLS[node.target].parameters).index("sparse")  # type: ignore[index]
    if "sparse" in node.kwargs:
        node.kwargs = {**node.kwargs, "sparse": False}
    else:
        node.args = (*node.args[:position], False, *node.args[position + 1 :])


def _renormalises(node: fx.Node, limit: Any) -> CaptureError:
    path = module_path(node)
    return CaptureError(
        f"an embedding writes into its table before it reads it (max_norm={limit})",
        where=path or source_line(stack_trace(node) or "") or None,
        why="a parameter would change in the forward, before there is a gradient, other rows on each rank",
        do="leave max_norm out, and scale what is looked up (x * (max_norm / x.norm(dim=-1, keepdim=True))"
        ".clamp(max=1)), or call torch.embedding_renorm_ on the table between steps",
    )
