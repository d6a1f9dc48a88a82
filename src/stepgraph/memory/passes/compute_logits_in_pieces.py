"""Applies a memory decision: logits, their loss and their gradient exist for some tokens at a time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph.analysis.row_regions import Region, find_region
from stepgraph.memory.gathered_rows import GatheredRows, find_gathered_rows
from stepgraph.operators.rows import Rows
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.build import Builder
from stepgraph.program.collectives import contiguous
from stepgraph.program.metadata import meta
from stepgraph.program.program import FORWARD, Program
from stepgraph.program.record import SUMMATION, program_pass
from stepgraph.torch_internals import UNSAFE_VIEW

aten = torch.ops.aten

# A product of 16 bits that is added to a sum of 32 exists beside it: so many parts of it one by one.
_PARTS = 2
_VIEWS = (aten.view.default, UNSAFE_VIEW)


@program_pass(
    reads="``pieces`` of a :class:`MemoryDecision`: stable names of products; what operations do with rows",
    writes=(
        "forward and backward of what is as wide as such a product, once for each piece of its rows, one "
        "piece after the other and all in the forward phase; in place of results rows joined, and sums "
        "over pieces, of types of 16 bits in float32; rows that a collective brings are gathered for "
        "each piece, and scattered"
    ),
    preserves=SUMMATION,
)
def compute_logits_in_pieces(program: Program, decision: MemoryDecision) -> Program:
    """Computes a head, its loss and their backward some rows at a time; one piece is bitwise the whole."""
    if not decision.pieces:
        return program
    for name, pieces in decision.pieces.items():
        by_name = {meta(node)["name"]: node for node in program.operations(FORWARD)}
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
    gathered = find_gathered_rows(region, pieces) if pieces > 1 else None
    writer = _Writer(program, region, gathered)
    rows = -(-region.rows // pieces)
    starts = range(0, region.rows, rows)
    for number, start in enumerate(starts):
        last = region.product.prev
        writer.write(start, min(start + rows, region.rows), number, len(starts))
        while (last := last.next) is not region.product:
            meta(last)["rows_piece"] = number
    for node, parts in writer.parts.items():
        result, whole = writer.joined(node, parts)
        meta(result)["name"] = meta(whole)["name"]
        whole.replace_all_uses_with(result, delete_user_cb=lambda user: user not in region.ways)


def _type_of_sum(node: fx.Node) -> torch.dtype:
    """What pieces of a floating-point result are added up in: 16 bits in 32."""
    return torch.promote_types(meta(node)["val"].dtype, torch.float32)


class _Writer:
    """Writes pieces of a region in front of it.

    ``parts``: of each result, what pieces make of it; of one that adds up, only the sum so far, or those of
    parts of its rows.
    """

    def __init__(self, program: Program, region: Region, gathered: GatheredRows | None) -> None:
        self.region, self.gathered = region, gathered
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
                    taken[argument, rows] = self._taken(argument, rows, start, stop, number)
                return taken[argument, rows]

            computed = way.instead or node
            args, kwargs = map_arg((way.args(stop - start), computed.kwargs), here)
            self.emit.module = meta(node)["module"]
            parts = self.parts.get(node, [])
            if way.result is None and pieces > 1 and node.target is aten.mm.default:
                parts[:] = self._products(node, parts, number, *args)
                continue
            made[node] = self._described(self._emit(computed.target, args, kwargs), node, number)
            if way.result is not None:
                parts.append(self._kept(node, made[node], number))
                continue
            part = made[node]
            if pieces > 1 and meta(node)["val"].dtype.is_floating_point:
                part = self.emit.cast(part, _type_of_sum(node))
            parts[:] = [self._added(part, *parts)]

    def _products(
        self, node: fx.Node, sums: list[fx.Node], number: int, left: fx.Node, right: fx.Node
    ) -> list[fx.Node]:
        """The sums of a product so far, and its next piece."""
        if meta(node)["val"].dtype == _type_of_sum(node):  # added while it is made
            target = aten.addmm.default if sums else node.target
            total = self._described(self.emit(target, *sums, left, right), node, number)
            return [self._summed(total) if sums else total]
        rows = meta(left)["val"].shape[0]
        step = -(-rows // _PARTS)
        found: list[fx.Node] = []
        for part, start in enumerate(range(0, rows, step)):
            some = self.emit(aten.slice.Tensor, left, 0, start, min(start + step, rows))
            product = self._described(self.emit(node.target, some, right), node, number, part)
            wide = self.emit.cast(product, _type_of_sum(node))
            found.append(self._added(wide, *sums[part : part + 1]))
        return found

    def _added(self, part: fx.Node, *total: fx.Node) -> fx.Node:
        """A part added to the sum so far, if there is one."""
        return self._summed(self.emit(aten.add.Tensor, *total, part)) if total else part

    def _emit(self, target: Any, args: tuple, kwargs: Mapping[str, Any]) -> fx.Node:
        if target in _VIEWS:  # of some rows, which may lie apart
            return self._shaped(*args)
        return self.emit(target, *args, **kwargs)

    def _summed(self, total: fx.Node) -> fx.Node:
        meta(total)["adds_pieces"] = True
        return total

    def _described(self, new: fx.Node, node: fx.Node, number: int, part: int = 0) -> fx.Node:
        """A piece of an operation says where that comes from; a view of the same shape is no operation."""
        if "name" not in meta(new):
            of = f".part_{part}" if part else ""
            meta(new)["name"] = f"{meta(node)['name']}{of}.piece_{number}"
            if source := meta(node).get("source"):
                meta(new)["source"] = source
        return new

    def _kept(self, node: fx.Node, part: fx.Node, number: int) -> fx.Node:
        """What is kept of a piece of a result with rows: this rank's, where a reduce-scatter follows."""
        if self.gathered is None or node not in self.gathered.scattered:
            return part
        end = self.gathered.scattered[node]
        return self._described(self.gathered.summed(self.emit, node, part), end, number)

    def joined(self, node: fx.Node, parts: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
        """A result of its parts, and what it stands for."""
        self.emit.module, self.emit.phase = meta(node)["module"], FORWARD
        rows, value = self.region.ways[node].result, meta(node)["val"]
        if rows is None:
            parts = [self.emit.cast(total, value.dtype) for total in parts]
            total = parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, 0)
            return self._shaped(total, list(value.shape)), node
        result = parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, rows.start)
        if self.gathered is not None and node in self.gathered.scattered:
            return result, self.gathered.scattered[node]
        if self.gathered is not None:
            result = self.gathered.restored(self.emit, result, rows.start)
        return self._shaped(result, list(value.shape)), node

    def _taken(self, argument: fx.Node, rows: Rows, start: int, stop: int, number: int) -> fx.Node:
        """Some rows of an argument, in one dimension; of what has a single one, that."""
        if self.gathered is not None and argument is self.gathered.hidden:
            return self._described(self.gathered.gathered(self.emit, number), argument, number)
        shape = meta(argument)["val"].shape
        many = rows.many(shape)
        self.emit.module = str(meta(argument).get("module", ""))
        key = argument, rows
        if key not in self._flat:
            flat = self._shaped(argument, rows.sizes(shape, many))
            if self.gathered is not None and many > 1:
                flat = self.gathered.ordered(self.emit, flat, rows.start)
            self._flat[key] = flat
        if many == 1 or stop - start == many:
            return self._flat[key]
        return self.emit(aten.slice.Tensor, self._flat[key], rows.start, start, stop)

    def _shaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(meta(node)["val"].shape) == list(shape):
            return node
        return self.emit(aten.view.default, contiguous(self.emit, node), shape)
