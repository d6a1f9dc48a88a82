"""Updates for which torch has a fused kernel on the host call that, several at once, in place."""

from collections.abc import Mapping
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.blocks import repetitions
from stepgraph.cost.memory import memory_timeline
from stepgraph.operators.updates import ADAMW, FUSED_ADAM, UPDATE
from stepgraph.operators.views import is_view, storage_roots
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, is_write
from stepgraph.program.record import SUMMATION, program_pass

aten = torch.ops.aten

# Bytes of gradients that wait for the last of several, where more would be held at the program's peak:
# updating them takes many times what a call costs.
_HELD = 2**22
_WRITTEN = (0, 2, 3)  # of parameter, gradient and the two states
_TYPES = (torch.float32, torch.float64)


@program_pass(
    reads="updates that name a kernel, and where their results are written",
    writes="the kernel, for several parameters at once, in place of updates and writes",
    preserves=SUMMATION,
    functional=False,
)
def fuse_updates(program: Program, fuses: bool) -> Program:
    """Joins updates that follow one another into calls of torch's fused kernel.

    A value that is not written into its own input is copied, and the copy written; but for a part of one
    that nobody reads again before all of it is written (ZeRO's, of a parameter that every rank has).
    A gradient that is multiplied with a number for its update alone is multiplied within the call.

    Args:
        fuses: the lowering makes one kernel of several operations.
    """
    if not fuses:
        return program
    if not any(map(_names_a_kernel, program.operations())):
        return program.finish()
    uses = _Uses(program)
    updates = _fusable(program, uses.root)
    layer = _layers(program, updates)
    groups = _groups(program, updates, layer)
    if not _fits(program, groups, uses):
        groups = _groups(program, updates, layer, _HELD)
    for group in groups:
        _join(program, group, uses)
    return program.finish()


class _Update(NamedTuple):
    """An update that the kernel can do.

    ``gradient`` times ``factor``, where there is one, is what it takes.
    """

    node: fx.Node
    gradient: fx.Node
    factor: fx.Node | None

    def bytes(self) -> int:
        """Of the gradient."""
        return meta(self.gradient)["val"].nbytes

    def kind(self) -> tuple[Any, ...]:
        """What those that are done together have in common."""
        return (*self.node.args[3:], meta(self.gradient)["val"].dtype, self.factor)


class _Uses:
    """Where each storage is read, by whoever does not write there, and where an input is written whole.

    Places are positions in the Program as it was.
    """

    def __init__(self, program: Program) -> None:
        self.root = storage_roots(program)
        self.place = {node: i for i, node in enumerate(program.operations())}
        self.reads: dict[fx.Node, list[int]] = {}
        self.writes: dict[fx.Node, list[int]] = {}
        for node, place in self.place.items():
            copies = node.target is torch_internals.mutable_copy
            target = node.args[0] if copies else node.kwargs.get("out")
            if isinstance(target, fx.Node) and target.op == "placeholder":
                self.writes.setdefault(target, []).append(place)
            sources = node.all_input_nodes
            if node.target is torch_internals.WAIT:  # until then what is sent is read
                sources = [*sources, *(s for start in sources for s in start.all_input_nodes)]
            for source in sources:
                if source is not target:
                    self.reads.setdefault(self.root[source], []).append(place)

    def is_read_behind(self, memory: fx.Node, place: int) -> bool:
        """Whether somebody reads it later."""
        return self.reads.get(memory, [-1])[-1] > place

    def renewal(self, memory: fx.Node, place: int) -> int | None:
        """Where all of it is written later, before anybody reads it."""
        last = self.writes.get(memory, [-1])[-1]
        between = any(place < read < last for read in self.reads.get(memory, ()))
        return last if last > place and not between else None


def _fusable(program: Program, root: dict[fx.Node, fx.Node]) -> dict[fx.Node, _Update]:
    written = {root[node] for node in program.operations() if is_write(node)}
    found = {}
    for node in program.operations():
        if not _names_a_kernel(node):
            continue
        gradient: fx.Node = node.args[0][1]  # type: ignore
        # In the memory of another parameter, whose update may write there meanwhile.
        if root[gradient] not in written:
            scaled = _scaled(gradient)
            if scaled is not None and root[scaled[0]] not in written:
                found[node] = _Update(node, *scaled)
            else:
                found[node] = _Update(node, gradient, None)
    return found


def _names_a_kernel(node: fx.Node) -> bool:
    """Whether an update can be the kernel's, which is there for the host alone."""
    return node.target is UPDATE and bool(node.args[3]) and _is_for_the_kernel(node)


def _is_for_the_kernel(node: fx.Node) -> bool:
    values = [meta(tensor)["val"] for tensor in node.args[0]]  # type: ignore[union-attr]
    host = torch_internals.host_device().type
    return all(
        value.device.type == host
        and value.dtype == values[0].dtype in _TYPES
        and (position == 1 or value.is_contiguous())
        for position, value in enumerate(values)
    )


def _scaled(gradient: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What is multiplied with which number, for one reader."""
    if gradient.target is not aten.mul.Tensor or len(gradient.users) != 1:
        return None
    value, factor = gradient.args
    if not isinstance(factor, fx.Node) or meta(factor)["val"].dim():
        return None
    types = {meta(node)["val"].dtype for node in (gradient, value, factor)}  # type: ignore[arg-type]
    return (value, factor) if len(types) == 1 else None  # type: ignore[return-value]


def _groups(
    program: Program,
    updates: Mapping[fx.Node, _Update],
    layer: Mapping[fx.Node, int | None],
    limit: int | None = None,
) -> list[list[_Update]]:
    """Updates of one kernel that are done together.

    Those of a repeated layer wait for its last one: layers are then the same code, which is compiled once.
    Others wait neither for what is awaited in between, nor for a layer's while something else is computed.

    Args:
        layer: of each update; None: it is of none.
        limit: bytes of gradients that may wait in a group.
    """
    groups: list[list[_Update]] = []
    kind: tuple | None = None
    last: int | None = None  # the layer of the last update
    computes = awaits = False  # since then
    made: set[fx.Node] = set()  # by the updates of the last group
    for node in program.operations():
        if node in updates:
            mine, another = updates[node], layer[node] != last
            full = limit is not None and kind and sum(one.bytes() for one in groups[-1]) > limit
            apart = (computes and another) or (awaits and (another or last is None))
            if mine.kind() != kind or full or apart:
                groups.append([])
                kind, made = mine.kind(), set()
            groups[-1].append(mine)
            made.add(node)
            last, computes, awaits = layer[node], False, False
        elif is_view(node) and node.all_input_nodes[0] in made:
            made.add(node)
        elif not _may_stand_between(node, made):
            kind = None
        else:
            computes |= _computes(node)
            awaits |= node.target is torch_internals.WAIT
    return groups


def _layers(program: Program, updates: Mapping[fx.Node, _Update]) -> dict[fx.Node, int | None]:
    """Which repeated layer each update is one of; None: of none.

    Layers are divided where most is computed between two updates.
    """
    computed = [0]
    for node in program.operations():
        if node in updates:
            computed.append(0)
        else:
            computed[-1] += _computes(node)
    order = [*updates]
    letters = [(meta(updates[node].gradient)["val"].shape, node.args[2:4]) for node in order]
    repeated = repetitions(letters, [-count for count in computed])
    layer: dict[fx.Node, int | None] = dict.fromkeys(order)
    for start, stop in chain.from_iterable(map(pairwise, repeated)):
        layer.update(dict.fromkeys(order[start:stop], start))
    return layer


def _computes(node: fx.Node) -> bool:
    return meta(node)["phase"] != OPTIMIZER and not is_view(node)


def _may_stand_between(node: fx.Node, made: set[fx.Node]) -> bool:
    """Whether an update may wait for another that comes behind this operation."""
    if node.target is torch_internals.mutable_copy:
        return True
    return not (is_write(node) or made & {*node.all_input_nodes})


def _fits(program: Program, groups: list[list[_Update]], uses: _Uses) -> bool:
    """Whether gradients may wait without raising the most that is held at once.

    New values that the kernel will write over the old ones are not counted.
    """
    totals = [sum(alive.values()) for alive in memory_timeline(program).at]
    change = [0] * (len(totals) + 1)
    for update in (update.node for group in groups for update in group):
        place = uses.place[update]
        # A list of results is held until the last of them is taken out.
        taken = max((uses.place[user] for user in update.users), default=0)
        for result, old in _written_values(update):
            until = None if result is None else _held_until(result, old, place, uses)
            if until is not None:
                change[place] -= meta(old)["val"].nbytes
                change[max(until, taken) + 1] += meta(old)["val"].nbytes
    held = [total + less for total, less in zip(totals, accumulate(change), strict=False)]
    peak = max(held, default=0)
    for group in groups:
        waiting = 0
        for one, following in pairwise(group):
            waiting += one.bytes()
            between = held[uses.place[one.node] + 1 : uses.place[following.node] + 1]
            if waiting + max(between) > peak:
                return False
    return True


def _held_until(result: fx.Node, old: fx.Node, place: int, uses: _Uses) -> int | None:
    """Where a new value ends that the kernel will write over the old one; None: it will not."""
    if write := _only_write(result, old):
        return uses.place[write]
    renewed = uses.renewal(uses.root[old], place)
    return renewed and min(renewed, uses.reads[uses.root[result]][-1])


def _written_values(update: fx.Node) -> list[tuple[fx.Node | None, fx.Node]]:
    """What the kernel writes: the new value, where it is read, and the old one."""
    results = {user.args[1]: user for user in update.users}
    tensors = update.args[0]
    return [(results.get(i), tensors[place]) for i, place in enumerate(_WRITTEN)]  # type: ignore


def _join(program: Program, group: list[_Update], uses: _Uses) -> None:
    """One call, where the last of them stands."""
    last = group[-1].node
    behind = uses.place[last]
    emit = Builder(program, OPTIMIZER, last)
    gradients: list[fx.Node] = []
    written: tuple[list[fx.Node], ...] = ([], [], [])  # parameters and their two states
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for node, gradient, _ in group:
        emit.module = meta(node)["module"]
        gradients.append(gradient)
        for column, (result, tensor) in zip(written, _written_values(node), strict=True):
            write = _only_write(result, tensor)
            if write is not None and not uses.is_read_behind(tensor, behind):
                program.graph.erase_node(write)
            else:
                if tensor.op == "placeholder" or uses.renewal(uses.root[tensor], behind) is None:
                    tensor = emit(aten.clone.default, tensor)
                replaced += [(result, tensor)] if result is not None else []
            column.append(tensor)
    parameters, means, squares = written
    settings, is_adamw = last.args[4], last.args[3] == ADAMW
    point = emit(
        FUSED_ADAM, parameters, gradients, means, squares, settings, is_adamw, group[-1].factor
    )
    for result, tensor in replaced:
        for view in _views_before(result, last):
            point.append(view)
            point = view
        result.replace_all_uses_with(tensor)
    for node, _, _ in group:
        for user in list(node.users):
            program.graph.erase_node(user)
        program.graph.erase_node(node)


def _views_before(value: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Views of a value, and views of those, that stand before an operation."""
    found = [user for user in value.users if is_view(user) and user < last]
    return [view for user in found for view in (user, *_views_before(user, last))]


def _only_write(result: fx.Node | None, target: fx.Node) -> fx.Node | None:
    """The write of a result into an input whose new value it is; None: others read it."""
    users = list(result.users) if result is not None else []
    if len(users) != 1 or users[0].target is not torch_internals.mutable_copy:
        return None
    return users[0] if users[0].args[0] is target and target.op == "placeholder" else None
