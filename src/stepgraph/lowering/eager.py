"""``eager``: the Python that fx generates, operator by operator."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.lowering.record import Executable, Lowering, no_obstacles
from stepgraph.planning.target import Target
from stepgraph.program.program import Program, runnable
from stepgraph.torch_internals.code import generate_code


def _make(program: Program, target: Target) -> Executable:
    for node in program.operations():
        node.target = runnable(node.target)
    generate_code(program.module)
    run = torch_internals.disable_compiler(program.module.forward)

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            return run(*inputs)

    return execute


EAGER = Lowering("eager", no_obstacles, _make)
