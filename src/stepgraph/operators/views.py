"""Which operations only rename memory: the one answer to "is it a view"."""

import functools
import operator

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.program.collectives import SHARD_OF
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, is_write

aten = torch.ops.aten
_WAIT, _UNSAFE_VIEW = torch_internals.WAIT, torch_internals.UNSAFE_VIEW  # asked for a million times
_RESHAPE = aten.reshape.default

# Show an argument in another shape, a part of it, or it repeated, whatever the layout.
REARRANGES = frozenset({
    aten.view.default, torch_internals.UNSAFE_VIEW, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.expand.default,
})  # fmt: skip
# Of those, what names a shape that the layout has to allow.
NAMES_A_SHAPE = frozenset({aten.view.default, torch_internals.UNSAFE_VIEW})
# What a flat collective's result is taken apart by.
PARTS_OF_A_RESULT = frozenset({aten.slice.Tensor, aten.reshape.default})


def is_view(node: fx.Node) -> bool:
    """Whether a node only renames memory: a view, one of several results, a wait."""
    return viewed(node) is not None and not is_write(node)


def storage_roots(program: Program) -> dict[fx.Node, fx.Node]:
    """For every node the node that allocated its storage (itself, unless it is a view)."""
    root: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        source = viewed(node)
        root[node] = root[source] if source is not None else node
    return root


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node's result shares storage with, if any."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is _WAIT or target is _UNSAFE_VIEW:
        return node.args[0]  # type: ignore[return-value]
    if target is SHARD_OF:  # a slice, once it is bound to a rank, if nothing has to be padded
        source, dim, ranks = node.args[:3]
        return source if meta(source)["val"].shape[dim] % ranks == 0 else None  # type: ignore
    aliased = operators.of(target).aliased
    if aliased is None:  # one of several results; a higher-order operator makes its own
        return node.args[0] if target is operator.getitem else None  # type: ignore[return-value]
    if not aliased:
        return None
    args = node.args
    for position in aliased:
        value = args[position] if position < len(args) else None
        if isinstance(value, fx.Node):
            return value if target is not _RESHAPE or _is_view_in_fact(node, value) else None
    out = node.kwargs.get("out")
    return out if isinstance(out, fx.Node) else None


def _is_view_in_fact(node: fx.Node, source: fx.Node) -> bool:
    """Whether a reshape, which copies where the layout demands it, does not."""
    value = meta(source)["val"]
    if value.is_contiguous():
        return True
    return _can_be_viewed(tuple(value.shape), value.stride(), tuple(meta(node)["val"].shape))


@functools.lru_cache(maxsize=4096)
def _can_be_viewed(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> bool:
    try:
        torch.empty_strided(shape, strides, device="meta").view(wanted)
    except (RuntimeError, ValueError):  # the second from fake tensors
        return False
    return True
