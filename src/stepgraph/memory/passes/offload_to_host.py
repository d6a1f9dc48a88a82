"""Applies a memory decision: what the backward reads late waits for it on the host.

After its last reader in the forward a value is copied there, and in the backward it is copied back into
memory of its own before its first reader. Each copy is started, and awaited later: in between others
compute. Views that the forward took of it are taken again of what has come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from stepgraph.cost.work import size_in_bytes
from stepgraph.memory.saved import first_behind, is_forward, obstacle, shown_in_forward
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.program.build import Builder, following
from stepgraph.program.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import BACKWARD, FORWARD, Program
from stepgraph.program.record import program_pass

# So much of what is offloaded may be on its way at once, in either direction. It takes memory of the
# device: little of what is freed. Of a deep model it is layers, whose time a copy then has. Of a shallow
# one it is at least what two operations read: the second's comes while the first computes.
_PART, _OPERATIONS = 16, 2


@program_pass(
    reads="``offload`` of a :class:`MemoryDecision`: stable names of forward values; who reads them",
    writes=(
        "``to_host`` behind the last reader in the forward, ``to_device`` before the first one in the "
        "backward, each with its ``wait_copy``; views of what has come back (``recomputed_from``)"
    ),
)
def offload_to_host(program: Program, decision: MemoryDecision) -> Program:
    """Copies values to the host and back; see the module docstring."""
    wanted = {*(decision.offload or ())}
    behind = first_behind(program)
    if not wanted or behind is None:
        return program
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    moved: list[_Moved] = []
    for node in [n for n in program.operations(FORWARD) if meta(n)["name"] in wanted]:
        if why := obstacle(node, behind):
            program.note(f"memory: {why}, and is not offloaded: {meta(node)['name']}")
            continue
        shown = shown_in_forward(node)
        users = {user for one in shown for user in one.users}
        readers = sorted((u for u in users if not is_forward(u)), key=place.__getitem__)
        if readers:
            last = max((*shown, *filter(is_forward, users)), key=place.__getitem__)
            moved.append(_Moved(node, shown, last, readers))
    if not moved:
        return program
    groups: dict[fx.Node, list[_Moved]] = {}
    for one in sorted(moved, key=lambda one: place[one.readers[0]]):
        groups.setdefault(one.readers[0], []).append(one)
    sizes = [sum(one.bytes for one in group) for group in groups.values()]
    limit = max(_OPERATIONS * max(sizes), sum(sizes) // _PART)
    _send(program, sorted(moved, key=lambda one: place[one.last]), limit, behind)
    _bring_back(program, list(groups.values()), limit, behind)
    return program.finish()


@dataclass(eq=False)
class _Moved:
    """A value that goes to the host.

    Attributes:
        shown: it, and views of it that the forward takes.
        last: behind which no operation of the forward reads it.
        readers: of any of them in the backward, in order.
        held, coming: its copy on the host; what is started in the backward.
    """

    value: fx.Node
    shown: list[fx.Node]
    last: fx.Node
    readers: list[fx.Node]
    held: fx.Node | None = None
    coming: fx.Node | None = None

    @property
    def bytes(self) -> int:
        """Of its memory."""
        return size_in_bytes(meta(self.value)["val"])

    def emit(
        self, program: Program, phase: str, before: fx.Node, target: Any, *args: Any
    ) -> fx.Node:
        """An operation on it."""
        emit = Builder(program, phase, before)
        emit.module = meta(self.value)["module"]
        node = emit(target, *args)
        if "placements" in meta(self.value):
            meta(node)["placements"] = meta(self.value)["placements"]
        return node


def _send(program: Program, moved: Sequence[_Moved], limit: int, end: fx.Node) -> None:
    """Starts copies to the host; each is awaited before the next would be too many, or at the end."""
    on_the_way: list[tuple[_Moved, fx.Node]] = []

    def arrived(before: fx.Node) -> None:
        one, started = on_the_way.pop(0)
        one.held = one.emit(program, FORWARD, before, WAIT_COPY, started, one.value)

    followed = [(one, following(one.last)) for one in moved]  # before anything stands in between
    for one, before in followed:
        while on_the_way and sum(m.bytes for m, _ in on_the_way) + one.bytes > limit:
            arrived(before)
        on_the_way.append((one, one.emit(program, FORWARD, before, TO_HOST, one.value)))
    while on_the_way:
        arrived(end)


def _bring_back(
    program: Program, groups: Sequence[Sequence[_Moved]], limit: int, beginning: fx.Node
) -> None:
    """Starts copies to the device where those before them are read, as far ahead as the limit allows.

    Args:
        groups: what is first read by one operation, in the order in which that happens.
        beginning: of the backward, where the first are started.
    """
    sizes = [sum(one.bytes for one in group) for group in groups]
    behind: dict[int, list[_Moved]] = {}  # by whose arrival -> what is started then; -1: at once
    ahead = 0
    for number, group in enumerate(groups):
        while sum(sizes[ahead : number + 1]) > limit:
            ahead += 1
        behind.setdefault(ahead - 1, []).extend(group)
    _start(program, behind.get(-1, ()), beginning)
    for number, group in enumerate(groups):
        first = group[0].readers[0]
        for one in group:
            there = one.emit(program, BACKWARD, first, WAIT_COPY, one.coming, one.held)
            _read_instead(program.graph, one, there, first)
        _start(program, behind.get(number, ()), first)


def _start(program: Program, moved: Sequence[_Moved], before: fx.Node) -> None:
    for one in moved:
        device = meta(one.value)["val"].device
        one.coming = one.emit(program, BACKWARD, before, TO_DEVICE, one.held, device)


def _read_instead(graph: fx.Graph, one: _Moved, there: fx.Node, first: fx.Node) -> None:
    """The backward reads what has come back, and views of that."""
    instead = {one.value: there}
    read = {source for reader in one.readers for source in reader.all_input_nodes}
    for view in reversed(one.shown[1:]):  # what is shown only to be shown is needed, too
        if view in read:
            read |= {*view.all_input_nodes}
    for view in one.shown[1:]:
        if view not in read:
            continue
        with graph.inserting_before(first):
            copy = graph.node_copy(view, lambda node: instead.get(node, node))
        tags = {k: v for k, v in meta(view).items() if k not in ("name", "checkpoint", "sequence")}
        set_meta(copy, tags | {"phase": BACKWARD, "recomputed_from": meta(view)["name"]})
        instead[view] = copy
    for reader in one.readers:
        for source, new in instead.items():
            reader.replace_input_with(source, new)
