"""Lowers one side of one graph of many, in AOTAutograd's calling convention.

What goes in and out besides tensors (a DTensor's mesh, nothing at all) goes round the compiler.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from stepgraph.graphwise.graph import is_tensor
from stepgraph.lowering.apply import lower
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.planning.target import Target
from stepgraph.program.program import Program


def lower_graph(
    graph: fx.GraphModule,
    lowering: LoweringDecision,
    target: Target,
    running: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> Callable:
    """Makes a forward, a backward or a graph without one executable.

    Args:
        graph: its collectives name process groups; what it computes is final.
        running: entered while it runs.

    Returns:
        a function that takes the list of inputs, empties it, and returns the results.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output = graph.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    taken = [i for i, node in enumerate(placeholders) if is_tensor(node)]
    computed = [node for node in results if is_tensor(node)]
    passed, constants = {}, {}
    for slot, node in enumerate(results):
        if isinstance(node, fx.Node) and node.op == "placeholder" and not is_tensor(node):
            passed[slot] = placeholders.index(node)
        elif not is_tensor(node):
            constants[slot] = (
                getattr(graph, str(node.target)) if isinstance(node, fx.Node) else node
            )
    output.args = (tuple(computed),)
    for index, node in enumerate(placeholders):
        if index not in taken:
            graph.graph.erase_node(node)
    program = Program("graph", graph, [], [], [], [])
    execute = lower(program, lowering, target)

    def run(arguments: list) -> Sequence[Any]:
        given = list(arguments)
        arguments.clear()
        others = constants | {slot: given[i] for slot, i in passed.items()}
        tensors = [given[i] for i in taken]
        given.clear()
        with running():
            found = iter(execute(tensors))
        return [others[slot] if slot in others else next(found) for slot in range(len(results))]

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd hands over the list itself
    return run
