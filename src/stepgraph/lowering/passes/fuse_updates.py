"""Updates for which torch has a fused kernel on the host call that, several at once, in place."""

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.analysis.blocks import repetitions
from stepgraph.operators.updates import ADAMW, FUSED_ADAM, UPDATE
from stepgraph.operators.views import is_view, storage_roots
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, is_write
from stepgraph.program.record import SUMMATION, program_pass

aten = torch.ops.aten

# Bytes of gradients that wait for the last of several: updating them takes many times what a call costs.
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

    A value that is not written into its own input (ZeRO's part of a parameter that every rank holds whole)
    is copied, and the copy written.

    Args:
        fuses: the lowering makes one kernel of several operations.
    """
    if not fuses:
        return program
    position = {node: i for i, node in enumerate(program.operations())}
    last_read = _last_reads(program)
    for group in _groups(program):
        behind = position[group[-1]]
        _join(program, group, {node for node, last in last_read.items() if last > behind})
    return program.finish()


def _is_fusable(node: fx.Node) -> bool:
    if node.target is not UPDATE or not node.args[3]:
        return False
    values = [meta(tensor)["val"] for tensor in node.args[0]]  # type: ignore[union-attr]
    host = torch_internals.host_device().type
    return all(
        value.device.type == host
        and value.dtype == values[0].dtype in _TYPES
        and (position == 1 or value.is_contiguous())
        for position, value in enumerate(values)
    )


def _groups(program: Program) -> list[list[fx.Node]]:
    """Updates of one kernel that are done together.

    None waits for what is awaited in between, nor for another layer's: layers are then the same code, which
    is compiled once.
    """
    operations = list(program.operations())
    updates = [node for node in operations if _is_fusable(node)]
    letters = [(_gradient(node).shape, node.args[2:4]) for node in updates]
    layers = repetitions(letters, [0] * (len(updates) + 1))
    starts = {updates[edge] for edges in layers for edge in edges if edge < len(updates)}
    groups: list[list[fx.Node]] = []
    kind: tuple | None = None
    held = 0
    made: set[fx.Node] = set()  # by the updates of the last group
    for node in operations:
        if _is_fusable(node):
            mine = (*node.args[3:], _gradient(node).dtype)
            if mine != kind or node in starts or held > _HELD:
                groups.append([])
                kind, held, made = mine, 0, set()
            groups[-1].append(node)
            held += _gradient(node).nbytes
            made.add(node)
        elif is_view(node) and node.all_input_nodes[0] in made:
            made.add(node)
        elif not _may_stand_between(node, made):
            kind = None
    return groups


def _gradient(update: fx.Node) -> torch.Tensor:
    return meta(update.args[0][1])["val"]  # type: ignore[index,arg-type]


def _may_stand_between(node: fx.Node, made: set[fx.Node]) -> bool:
    """Whether an update may wait for another that comes behind this operation."""
    if node.target is torch_internals.mutable_copy:
        return True
    return not (
        is_write(node) or node.target is torch_internals.WAIT or made & {*node.all_input_nodes}
    )


def _join(program: Program, group: list[fx.Node], read_behind: set[fx.Node]) -> None:
    """One call, where the last of them stands.

    Args:
        read_behind: values that are read behind that.
    """
    emit = Builder(program, OPTIMIZER, group[-1])
    columns: list[list[fx.Node]] = [[], [], [], []]
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for node in group:
        emit.module = meta(node)["module"]
        results = {user.args[1]: user for user in node.users}
        for place, tensor in enumerate(node.args[0]):  # type: ignore[arg-type]
            if place in _WRITTEN:
                result = results.get(_WRITTEN.index(place))
                write = _only_write(result, tensor)
                if write is not None and tensor not in read_behind:
                    program.graph.erase_node(write)
                else:
                    tensor = emit(aten.clone.default, tensor)
                    replaced += [(result, tensor)] if result is not None else []
            columns[place].append(tensor)
    last = group[-1]
    point = emit(FUSED_ADAM, *columns, last.args[4], last.args[3] == ADAMW)
    for result, tensor in replaced:
        for view in _views_before(result, last):
            point.append(view)
            point = view
        result.replace_all_uses_with(tensor)
    for node in group:
        for user in list(node.users):
            program.graph.erase_node(user)
        program.graph.erase_node(node)


def _views_before(value: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Views of a value, and views of those, that stand before an operation."""
    found = [user for user in value.users if is_view(user) and user < last]
    return [view for user in found for view in (user, *_views_before(user, last))]


def _last_reads(program: Program) -> dict[fx.Node, int]:
    """Where each storage is read last, by whoever does not write there."""
    root = storage_roots(program)
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(program.operations()):
        if node.target is not torch_internals.mutable_copy:
            last |= {root[source]: position for source in node.all_input_nodes}
    return last


def _only_write(result: fx.Node | None, target: fx.Node) -> fx.Node | None:
    """The write of a result into an input whose new value it is; None: others read it."""
    users = list(result.users) if result is not None else []
    if len(users) != 1 or users[0].target is not torch_internals.mutable_copy:
        return None
    return users[0] if users[0].args[0] is target and target.op == "placeholder" else None
