"""What stands beside the computation of layers: parameters on their way to it, and gradients behind it.

Where that runs depends on how many layers share a bucket; what the layers compute does not. So layers are
looked for without it, and it is called between them, as it is: it is copies and communication, for which
there is nothing to compile.
"""

from collections.abc import Mapping

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.lowering.handed_on import floats, pointwise
from stepgraph.operators.norms import SUM_OF_SQUARES
from stepgraph.operators.updates import FUSED_ADAM
from stepgraph.program import roles
from stepgraph.program.collectives import communicates
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, is_write, tensors_of
from stepgraph.torch_internals.code import inputs_of

aten = torch.ops.aten

_STATE = (roles.Param, roles.Buffer, roles.OptimizerState, roles.Scalar, roles.Accumulator)
# Operations that are kernels, or calls, of their own wherever they stand.
_CALLS = {torch_internals.mutable_copy, aten.cat.default, FUSED_ADAM, SUM_OF_SQUARES}


Roots = Mapping[fx.Node, fx.Node]


def find_beside(program: Program, operations: list[fx.Node], root: Roots) -> set[fx.Node]:
    """Operations that are no layer's own: between state and collectives, and behind these up to updates.

    Args:
        program: as it is executed.
        operations: those of it that are no views.
        root: of each node what it shows.
    """
    of_state = _made_of_state(program, operations, root)
    readers = _readers(operations, root)
    results = {root[node] for node in program.results}
    beside = {node for node in operations if communicates(node) and node in of_state}
    if not beside and not any(map(communicates, operations)):
        return beside
    for node in operations:
        if _takes_from(node, beside, root):
            beside.add(node)
    ends = _leads_to_updates(operations, readers, results)

    def arrived(value: fx.Node) -> bool:
        source = root[value]
        return is_of_a_collective(source) or (source in beside and source in ends)

    for node in operations:
        if node in ends and (communicates(node) or any(map(arrived, inputs_of(node)))):
            beside.add(node)
    for node in reversed(operations):  # what only such operations read
        read_by = readers.get(node, set())
        joins = node.target is aten.cat.default and node in ends
        counts = meta(node)["phase"] == OPTIMIZER and node in of_state
        if read_by <= beside and (counts or (read_by and (node in of_state or joins))):
            beside.add(node)
    return beside


def is_a_call(node: fx.Node) -> bool:
    """Whether nothing is gained by compiling an operation: it is one call, a copy, or a single number."""
    values = tensors_of(meta(node).get("val"))
    number = len(values) == 1 and not values[0].dim()
    return node.target in _CALLS or is_of_a_collective(node) or copies(node) or number


def is_of_a_collective(node: fx.Node) -> bool:
    """Whether a node starts communication, or waits for it."""
    return communicates(node) or node.target is torch_internals.WAIT


def _made_of_state(program: Program, operations: list[fx.Node], root: Roots) -> set[fx.Node]:
    """What a step computes from its state alone, whatever the batch."""
    # Of one graph of many it is not said what its inputs are.
    inputs = zip(program.inputs, program.placeholders, strict=False)
    found = {node for role, node in inputs if isinstance(role, _STATE)}
    for node in operations:
        sources = [root[source] for source in inputs_of(node)]
        if sources and all(source in found for source in sources):
            found.add(node)
    return found


def _takes_from(node: fx.Node, beside: set[fx.Node], root: Roots) -> bool:
    """Whether an operation waits for what is gathered, or copies a part of it to where that lies alone."""
    waits = node.target is torch_internals.WAIT
    return (waits or copies(node)) and root[node.args[0]] in beside  # type: ignore[index]


def copies(node: fx.Node) -> bool:
    """Whether an operation only copies a value, or a part of one, to memory of its own."""
    return node.target in (aten.clone.default, aten.reshape.default) and not floats(node)


def _readers(operations: list[fx.Node], root: Roots) -> dict[fx.Node, set[fx.Node]]:
    """The operations that read a value or a view of it."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in operations:
        for source in inputs_of(node):
            found.setdefault(root[source], set()).add(node)
    return found


def _leads_to_updates(
    operations: list[fx.Node], readers: dict[fx.Node, set[fx.Node]], results: set[fx.Node]
) -> set[fx.Node]:
    """Behind which only updates, writes and results come, and element-wise work on the way there."""
    found: set[fx.Node] = set()
    for node in reversed(operations):
        read_by = readers.get(node, set())
        leads = (read_by or node in results or is_write(node)) and read_by <= found
        if meta(node)["phase"] == OPTIMIZER or (leads and (is_a_call(node) or pointwise(node))):
            found.add(node)
    return found
