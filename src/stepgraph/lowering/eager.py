"""``eager``: the Python that fx generates, operator by operator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import torch_internals
from stepgraph.lowering.record import Executable, Lowering, no_obstacles
from stepgraph.planning.target import Target
from stepgraph.program.program import Program, runnable
from stepgraph.torch_internals.code import generate_code


def operator_by_operator(module: fx.GraphModule) -> Callable[..., Any]:
    """What runs a graph as the Python that fx generates; its views become such that may copy."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = runnable(node.target)
    generate_code(module)
    return module.forward


def _make(program: Program, target: Target) -> Executable:
    run = torch_internals.disable_compiler(operator_by_operator(program.module))

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            return run(*inputs)

    return execute


EAGER = Lowering("eager", no_obstacles, _make)
