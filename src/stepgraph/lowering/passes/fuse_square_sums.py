"""The squares of many gradients that clipping adds up one by one are summed by one operation."""

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.norms import SUM_OF_SQUARES
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals import operators as private

aten = torch.ops.aten


@program_pass(
    reads="sums of squares that the optimizer's phase adds up",
    writes="one operation in place of those between which nothing is awaited",
    preserves=SUMMATION,
    functional=False,
)
def fuse_square_sums(program: Program, fuses: bool) -> Program:
    """Sums squares of several tensors at once, where the last of them is known.

    Three operations for each parameter become one for all. What is summed before a wait is not made to
    stand behind it.

    Args:
        fuses: the lowering makes one kernel of several operations.
    """
    if not fuses:
        return program
    awaited: dict[fx.Node, tuple[int, int]] = {}  # waits before each operation, and its place
    waits = 0
    for place, node in enumerate(program.operations()):
        waits += node.target is torch_internals.WAIT
        awaited[node] = (waits, place)
    for end in [node for node in awaited if _adds(node) and not _goes_on(node)]:
        stretches: dict[int, list[fx.Node]] = {}
        sums = sorted(_summed_up_to(end), key=awaited.__getitem__)
        for node in sums:
            stretches.setdefault(awaited[node][0], []).append(node)
        if len(stretches) < len(sums):
            _fuse(program, end, [*stretches.values()])
    return program.finish()


def _squared(node: object) -> fx.Node | None:
    """The tensor whose squares an operation sums, for one reader."""
    if not isinstance(node, fx.Node) or node.target is not aten.sum.default or len(node.users) != 1:
        return None
    (product,) = node.all_input_nodes
    if product.target is not aten.mul.Tensor or product.args[0] is not product.args[1]:
        return None
    tensor = product.all_input_nodes[0]
    narrow = tensor.target is private.TO_COPY and len(tensor.users) == 1
    tensor = tensor.all_input_nodes[0] if narrow else tensor
    alone = len(product.users) == 1 and meta(node)["phase"] == OPTIMIZER
    return tensor if alone and meta(tensor)["val"].is_floating_point() else None


def _adds(node: object) -> bool:
    """Whether squares are added to a sum."""
    return (
        isinstance(node, fx.Node)
        and node.target is aten.add.Tensor
        and not node.kwargs
        and _squared(node.args[1]) is not None
        and isinstance(node.args[0], fx.Node)
    )


def _goes_on(addition: fx.Node) -> bool:
    """Whether squares are added to this sum as well, and nobody else reads it."""
    reader = next(iter(addition.users), None)
    return len(addition.users) == 1 and _adds(reader) and reader.args[0] is addition  # type: ignore[union-attr]


def _additions(end: fx.Node) -> list[fx.Node]:
    """A chain of additions, from the last to the first."""
    chain = [end]
    while _adds(chain[-1].args[0]) and _goes_on(chain[-1].args[0]):  # type: ignore[arg-type]
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain


def _summed_up_to(end: fx.Node) -> list[fx.Node]:
    """The sums of squares that a chain of additions adds; none where their types differ."""
    chain = _additions(end)
    sums = [addition.args[1] for addition in chain]
    if _squared(chain[-1].args[0]) is not None:
        sums.append(chain[-1].args[0])
    types = {meta(node)["val"].dtype for node in (end, *sums)}  # type: ignore[arg-type]
    return sums if len(types) == 1 else []  # type: ignore[return-value]


def _fuse(program: Program, end: fx.Node, stretches: list[list[fx.Node]]) -> None:
    """One operation for each stretch, and their sum in place of the last addition."""
    before = _additions(end)[-1].args[0]
    total = None if any(before in sums for sums in stretches) else before
    for sums in stretches:
        emit = Builder(program, OPTIMIZER, sums[-1])
        tensors = [_squared(node) for node in sums]
        part = emit(SUM_OF_SQUARES, tensors, dtype=meta(end)["val"].dtype)
        emit = Builder(program, OPTIMIZER, end)
        total = part if total is None else emit(aten.add.Tensor, total, part)
    end.replace_all_uses_with(total)  # type: ignore[arg-type]
