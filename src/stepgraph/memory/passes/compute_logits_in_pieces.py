"""Applies a memory decision: logits, their loss and their gradient exist for some tokens at a time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph.analysis.row_regions import Region, find_region
from stepgraph.operators.rows import Rows
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.build import Builder
from stepgraph.program.collectives import contiguous
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals import UNSAFE_VIEW

aten = torch.ops.aten

_VIEWS = (aten.view.default, UNSAFE_VIEW)


@program_pass(
    reads="``pieces`` of a :class:`MemoryDecision`: stable names of products; what operations do with rows",
    writes=(
        "forward and backward of what is as wide as such a product, once for each piece of its rows, one "
        "piece after the other and all in the forward phase; in place of results rows joined, and sums "
        "over pieces, of types of 16 bits in float32"
    ),
    preserves=SUMMATION,
)
def compute_logits_in_pieces(program: Program, decision: MemoryDecision) -> Program:
    """Computes a head, its loss and their backward some rows at a time; one piece is bitwise the whole."""
    if not decision.pieces:
        return program
    by_name = {meta(node)["name"]: node for node in program.operations(FORWARD)}
    for name, pieces in decision.pieces.items():
        region = find_region(program, by_name[name]) if name in by_name else None
        if region is None:
            program.note(f"memory: {name} is computed whole: its loss is not one of row by row")
            continue
        _compute(program, region, pieces)
        program.finish()
    return program


def _compute(program: Program, region: Region, pieces: int) -> None:
    for node in region.earlier:
        region.product.prepend(node)
        if node.op == "call_function":
            meta(node)["phase"] = FORWARD
    writer = _Writer(program, region)
    rows = -(-region.rows // pieces)
    starts = range(0, region.rows, rows)
    for number, start in enumerate(starts):
        last = region.product.prev
        writer.write(start, min(start + rows, region.rows), number, len(starts))
        while (last := last.next) is not region.product:
            meta(last)["rows_piece"] = number
    for node, parts in writer.parts.items():
        result = writer.joined(node, parts)
        meta(result)["name"] = meta(node)["name"]
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in region.ways)
    for node in reversed(region.ways):
        if not node.users:
            program.graph.erase_node(node)


def _adds_up_inside(node: fx.Node) -> bool:
    """Whether a product can be added to the sum so far while it is made: in the type of the sum."""
    dtype = meta(node)["val"].dtype
    return node.target is aten.mm.default and torch.promote_types(dtype, torch.float32) == dtype


class _Writer:
    """Writes pieces of a region in front of it.

    ``parts``: of each result, what pieces make of it; of one that adds up, only the sum so far.
    """

    def __init__(self, program: Program, region: Region) -> None:
        self.region = region
        self.emit = Builder(program, FORWARD, region.product)
        self.parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.results}
        self._flat: dict[tuple[fx.Node, Rows], fx.Node] = {}

    def write(self, start: int, stop: int, number: int, pieces: int) -> None:
        """The piece of some rows."""
        made: dict[fx.Node, fx.Node] = {}
        taken: dict[tuple[fx.Node, Rows], fx.Node] = {}
        for node, way in self.region.ways.items():

            def here(
                argument: fx.Node, arguments: Mapping[fx.Node, Rows | None] = way.arguments
            ) -> fx.Node:
                if argument in made:
                    return made[argument]
                rows = arguments[argument]
                if rows is None:
                    return argument
                if (argument, rows) not in taken:
                    taken[argument, rows] = self._taken(argument, rows, start, stop)
                return taken[argument, rows]

            computed = way.instead or node
            args, kwargs = map_arg((way.args(stop - start), computed.kwargs), here)
            self.emit.module = meta(node)["module"]
            parts = self.parts.get(node, [])
            if way.result is None and parts and _adds_up_inside(node):
                total = self.emit(aten.addmm.default, *parts, *args)
                parts[:] = [self._summed(self._described(total, node, number))]
                continue
            made[node] = self._described(self._emit(computed.target, args, kwargs), node, number)
            if way.result is not None:
                parts.append(made[node])
                continue
            part, dtype = made[node], meta(node)["val"].dtype
            if pieces > 1 and dtype.is_floating_point:
                part = self.emit.cast(part, torch.promote_types(dtype, torch.float32))
            parts[:] = [self._summed(self.emit(aten.add.Tensor, *parts, part)) if parts else part]

    def _emit(self, target: Any, args: tuple, kwargs: Mapping[str, Any]) -> fx.Node:
        if target in _VIEWS:  # of some rows, which may lie apart
            return self._shaped(*args)
        return self.emit(target, *args, **kwargs)

    def _summed(self, total: fx.Node) -> fx.Node:
        meta(total)["adds_pieces"] = True
        return total

    def _described(self, new: fx.Node, node: fx.Node, number: int) -> fx.Node:
        """A piece of an operation says where that comes from; a view of the same shape is no operation."""
        if "name" not in meta(new):
            meta(new)["name"] = f"{meta(node)['name']}.piece_{number}"
            if source := meta(node).get("source"):
                meta(new)["source"] = source
        return new

    def joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """A result of its parts."""
        self.emit.module, self.emit.phase = meta(node)["module"], FORWARD
        rows, value = self.region.ways[node].result, meta(node)["val"]
        if rows is None:
            (result,) = parts
            result = self.emit.cast(result, value.dtype)
        else:
            result = parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, rows.start)
        return self._shaped(result, list(value.shape))

    def _taken(self, argument: fx.Node, rows: Rows, start: int, stop: int) -> fx.Node:
        """Some rows of an argument, in one dimension; of what has a single one, that."""
        shape = meta(argument)["val"].shape
        many = rows.many(shape)
        self.emit.module = str(meta(argument).get("module", ""))
        key = argument, rows
        if key not in self._flat:
            self._flat[key] = self._shaped(argument, rows.sizes(shape, many))
        if many == 1 or stop - start == many:
            return self._flat[key]
        return self.emit(aten.slice.Tensor, self._flat[key], rows.start, start, stop)

    def _shaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(meta(node)["val"].shape) == list(shape):
            return node
        return self.emit(aten.view.default, contiguous(self.emit, node), shape)
