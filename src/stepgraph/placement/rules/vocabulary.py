"""Tables sharded by rows, and choices among classes that are sharded: what each rank does alone.

An embedding, a ``gather`` of the label's logit and their backwards read one row in many. Where rows are
sharded, a rank answers for its own and adds zero for the others; DTensor says so with a placement of its
own (``MaskPartial``), a plain program spells it out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators.entries import Entry, Strategy
from stepgraph.program.collectives import SHARD_OF
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import tensor_arguments

aten = torch.ops.aten

_SUM, _WHOLE = Partial("sum"), Replicate()


def share_traffic(old: fx.Node, nodes: list[fx.Node], index: fx.Node) -> None:
    """What an operation moves is moved by those in its place: a compiler makes them one kernel.

    By the same operator if it is among them, else by what reads the index and by the last.
    """
    if "traffic" not in meta(old):
        return
    reads, writes = meta(old)["traffic"]
    same = any(node.target is old.target for node in nodes)
    for node in nodes:
        kept = {key: v for key, v in meta(old).items() if key in ("dispatched", "kernel")}
        set_meta(node, {**meta(node), **kept})
        stands_for = node.target is old.target if same else node is nodes[-1]
        mine = tuple(not same and a is index and reads[1] for a in tensor_arguments(node))
        meta(node)["traffic"] = (reads if same and stands_for else mine, stands_for and writes)
        meta(node)["starts"] = stands_for and meta(old)["starts"]


# ------------------------------------------------------------------------------------- strategies


def _embedding_backward(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    counted = len(node.args) > 4 and node.args[4]  # by frequency in the whole batch, and table
    return [] if counted else [Strategy((_WHOLE, _WHOLE), (Shard(0),))]


def _scatter(node: fx.Node, placements: tuple[Placement, ...]) -> list[Strategy]:
    """One class a row: a comparison with the label says which rank has it."""
    shard = Shard(class_dim(node))
    return [Strategy((shard, _WHOLE), (shard,))] if one_a_row(node) else []


def one_a_row(node: fx.Node) -> bool:
    """Whether a gather or scatter picks one class a row."""
    dim = class_dim(node)
    whole, index = (meta(argument)["val"].shape for argument in tensor_arguments(node))
    return index == (*whole[:dim], 1, *whole[dim + 1 :])


def class_dim(node: fx.Node) -> int:
    """The dimension of a gather or scatter that classes lie in."""
    return node.args[1] % meta(tensor_arguments(node)[0])["val"].dim()  # type: ignore[operator]


STRATEGIES: dict[Any, Entry] = {
    aten.embedding.default: lambda node, _: [Strategy((Shard(0), _WHOLE), (_SUM,))],
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: lambda node, _: [Strategy((Shard(class_dim(node)), _WHOLE), (_SUM,))],
    aten.scatter.value: _scatter,
}


# ------------------------------------------------------------------------------------ local forms


class Rows:
    """This rank's rows of a table of ``size`` along a mesh dimension, as nodes.

    Args:
        emit: ``emit(target, *args, **kwargs) -> node``.
        size: rows of the whole table.
    """

    def __init__(self, emit: Any, size: int, mesh_dim: str, ranks: int, device: Any) -> None:
        self.emit, self.count = emit, size // ranks
        every = emit(aten.arange.default, size, device=device)
        self.ids = emit(SHARD_OF, every, 0, ranks, mesh_dim)
        self.first = emit(aten.select.int, self.ids, 0, 0)

    def find(self, index: fx.Node) -> tuple[fx.Node, fx.Node]:
        """(position among this rank's rows, whether it is not one of them) of global row numbers."""
        emit = self.emit
        position = emit(aten.sub.Tensor, index, self.first)
        below = emit(aten.lt.Scalar, position, 0)
        beyond = emit(aten.ge.Scalar, position, self.count)
        elsewhere = emit(aten.logical_or.default, below, beyond)
        return emit(aten.clamp.default, position, 0, self.count - 1), elsewhere


def _local_embedding(rows: Rows, node: fx.Node, args: tuple) -> fx.Node:
    table, index = args[:2]
    position, elsewhere = rows.find(index)
    found = rows.emit(aten.embedding.default, table, position)
    masked = rows.emit(aten.unsqueeze.default, elsewhere, -1)
    return rows.emit(aten.masked_fill.Scalar, found, masked, 0.0)


def _local_embedding_backward(rows: Rows, node: fx.Node, args: tuple) -> fx.Node:
    gradient, index, _, padding, _ = args
    position, elsewhere = rows.find(index)
    if padding >= 0:  # a row that gets no gradient
        is_padding = rows.emit(aten.eq.Scalar, index, padding)
        elsewhere = rows.emit(aten.logical_or.default, elsewhere, is_padding)
    masked = rows.emit(aten.unsqueeze.default, elsewhere, -1)
    kept = rows.emit(aten.masked_fill.Scalar, gradient, masked, 0.0)
    return rows.emit(aten.embedding_dense_backward.default, kept, position, rows.count, -1, False)


def _local_gather(rows: Rows, node: fx.Node, args: tuple) -> fx.Node:
    values, dim, index = args[:3]
    position, elsewhere = rows.find(index)
    found = rows.emit(aten.gather.default, values, dim, position)
    return rows.emit(aten.masked_fill.Scalar, found, elsewhere, 0.0)


def chosen_by_class(emit: Any, classes: fx.Node, args: tuple) -> fx.Node:
    """``table`` with a number where a row's index is the class; zeros need not be there first."""
    table, dim, index, number = args
    value = meta(table)["val"]
    shape = [1] * value.dim()
    shape[dim] = meta(classes)["val"].shape[0]
    chosen = emit(aten.eq.Tensor, index, emit(aten.view.default, classes, shape))
    if table.target is not aten.zeros_like.default:
        return emit(aten.masked_fill.Scalar, table, chosen, number)
    pair = [
        emit(aten.scalar_tensor.default, x, dtype=value.dtype, device=value.device)
        for x in (number, 0.0)
    ]
    return emit(aten.where.self, chosen, *pair)


LOCAL_FORMS: dict[Any, Callable[[Rows, fx.Node, tuple], fx.Node]] = {
    aten.embedding.default: _local_embedding,
    aten.embedding_dense_backward.default: _local_embedding_backward,
    aten.gather.default: _local_gather,
    aten.scatter.value: lambda rows, node, args: chosen_by_class(rows.emit, rows.ids, args),
}


def rows_sharded(node: fx.Node, inputs: tuple, outputs: tuple) -> tuple[int, int] | None:
    """(mesh axis, size of the whole table) where a placed operation has its rows sharded, or None.

    Args:
        inputs, outputs: placements of each tensor argument and result, over all mesh dimensions.
    """
    if node.target not in LOCAL_FORMS:
        return None
    first = meta(tensor_arguments(node)[0])["val"]
    match node.target:
        case aten.embedding.default:
            placements, dim, size = inputs[0], 0, first.shape[0]
        case aten.embedding_dense_backward.default:
            placements, dim, size = outputs[0], 0, int(node.args[2])  # type: ignore[call-overload]
        case _:
            dim = class_dim(node)
            placements, size = inputs[0], first.shape[dim]
    axes = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
    return (axes[0], size) if axes else None
