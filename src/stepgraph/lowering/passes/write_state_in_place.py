"""State is written where it lives, and is no longer a result."""

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.operators.views import storage_roots
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.copies import TO_HOST, TO_HOST_INTO, WAIT_COPY, WAIT_HOST
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.names import name_operations
from stepgraph.program.program import FORWARD, OPTIMIZER, Program
from stepgraph.program.record import program_pass
from stepgraph.torch_internals.code import inputs_of

aten = torch.ops.aten


@program_pass(
    reads="roles",
    writes="``copy_``, ``all_gather_into_tensor_out`` and ``to_host_into``; drops ``New*`` outputs",
    functional=False,
)
def write_state_in_place(program: Program) -> Program:
    """Writes each ``New*`` result into its input, right behind its producer.

    Not before the last reader of the input's old value (or of a view of it). Where the new value is an
    all-gather, the gather writes straight into the input: no buffer, no copy; so does a copy to the host.
    """
    inputs = {role: node for role, node, _ in program.input_rows}
    root = storage_roots(program)
    _keep_old_values(program, inputs, root)
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    order = list(program.graph.nodes)
    last_read: dict[fx.Node, int] = {}
    for node in program.operations():
        for source in inputs_of(node):
            last_read[root[source]] = position[node]
    kept = []
    for role, node, value in program.output_rows:
        written = roles.written_input(role)
        if written is None or written not in inputs:
            kept.append((role, node, value))
            continue
        target = inputs[written]
        if node is target:
            continue
        behind = max(position[node], last_read.get(target, 0))
        into = _copy_into if node.target is WAIT_COPY else _gather_into
        if not into(program, node, target, position, last_read):
            with program.graph.inserting_after(order[behind]):
                copy = program.graph.call_function(torch_internals.mutable_copy, (target, node))
            same = {key: v for key, v in meta(node).items() if key in ("val", "phase", "module")}
            set_meta(copy, {"phase": OPTIMIZER, **same})
            meta(copy)["name"] = f"{roles.label(written)}/write"
    program.set_outputs(kept)
    return program.finish()


def _keep_old_values(
    program: Program, inputs: dict[roles.Input, fx.Node], root: dict[fx.Node, fx.Node]
) -> None:
    """A result that is an input's old value (a snapshot, a swap) is copied before that is overwritten.

    Copies are added to ``root``.
    """
    targets = [inputs.get(roles.written_input(role)) for role in program.outputs]  # type: ignore[arg-type]
    overwritten = {target for target in targets if target is not None}
    results = list(program.results)
    first = next(program.operations(), program.graph.output_node())
    for i, (node, target) in enumerate(zip(results, targets, strict=True)):
        if node is target or root[node] not in overwritten:
            continue
        point = first if node.op == "placeholder" else node.next
        emit = Builder(program, meta(node).get("phase", FORWARD), point)
        copy = results[i] = emit(aten.clone.default, node)
        root[copy] = copy
    if results != program.results:
        program.graph.output_node().args = (tuple(results),)
        name_operations(program.graph)


def _gather_into(program: Program, node: fx.Node, target: fx.Node, position, last_read) -> bool:
    """Lets the all-gather behind ``node`` write into ``target``, if nothing reads either later."""
    if node.target is not torch_internals.WAIT:
        return False
    gather = node.args[0]
    if not isinstance(gather, fx.Node) or gather.target is not torch_internals.ALL_GATHER:
        return False
    if last_read.get(target, 0) > position[gather] or len(node.users) > 1:
        return False
    gather.target = torch_internals.ALL_GATHER_INTO
    gather.kwargs = {"out": target}
    return True


def _copy_into(program: Program, node: fx.Node, target: fx.Node, position, last_read) -> bool:
    """The same for a copy to the host."""
    started, source = node.args
    if not isinstance(started, fx.Node) or started.target is not TO_HOST or len(node.users) > 1:
        return False
    if last_read.get(target, 0) > position[started]:
        return False
    for one, instead in ((started, TO_HOST_INTO), (node, WAIT_HOST)):
        one.target, one.args = instead, (target, source)
        meta(one).pop("val")
    return True
