"""Updates that compute with matrices as a whole (Muon): each is gathered once, and once divided again."""

from collections.abc import Callable, Iterable

from torch import fx

from stepgraph.cost.work import node_flops
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, tensors_of


def whole_in_update(program: Program) -> set[fx.Node]:
    """Operations of the update that every rank does whole.

    Products, the sums over whole matrices that they are scaled by, and what lies between any two of these:
    ranks would gather, add up and divide there again and again. What goes in is divided like the gradient,
    and what comes out like the parameter.
    """
    update = set(program.operations(OPTIMIZER))
    products = {node for node in update if _is_product(node)}
    if not products:
        return set()
    before = _reached(products, lambda node: node.all_input_nodes, update)
    ends = products | {node for node in before if _sums(node)}
    after = _reached(ends, lambda node: node.users, update)
    return ends | (before & after)


def _is_product(node: fx.Node) -> bool:
    return node_flops(node) > 0 or "linalg" in str(node.target)


def _sums(node: fx.Node) -> bool:
    """Whether it makes less of a matrix."""
    made = sum(tensor.dim() for tensor in tensors_of(meta(node)["val"]))
    return any(
        tensor.dim() > max(1, made)
        for argument in node.all_input_nodes
        for tensor in tensors_of(meta(argument)["val"])
    )


def _reached(
    start: set[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]], among: set[fx.Node]
) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(start)
    while stack:
        for node in following(stack.pop()):
            if node in among and node not in found:
                found.add(node)
                stack.append(node)
    return found
