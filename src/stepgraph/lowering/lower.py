"""The named lowerings: how a Program of one rank becomes a callable.

``eager``: the Python that fx generates, operator by operator. ``inductor``: torch's compiler on the
whole program, its in-place writes included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph import torch_internals
from stepgraph.errors import UsageError, near_misses
from stepgraph.program.program import Program

Executable = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def _lower_eager(program: Program) -> Executable:
    program.module.recompile()
    run = torch_internals.disable_compiler(program.module.forward)

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            return run(*inputs)

    return execute


# The whole step is one graph, already differentiated and scheduled: what inductor is told beyond its
# defaults.
INDUCTOR_SETTINGS: dict[str, Any] = {}


def _lower_inductor(program: Program) -> Executable:
    program.module.recompile()
    examples = [node.meta["val"] for node in program.placeholders]
    run = torch_internals.compile_with_inductor(program.module, examples, INDUCTOR_SETTINGS)

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        return run(list(inputs))

    return execute


LOWERINGS: dict[str, Callable[[Program], Executable]] = {
    "inductor": _lower_inductor,
    "eager": _lower_eager,
}


def check_lowering(name: str) -> None:
    """Raises UsageError for an unknown lowering; the message lists the known ones."""
    if name not in LOWERINGS:
        raise UsageError(f"unknown lowering {name!r}", do=near_misses(name, LOWERINGS))


def lower(program: Program, name: str) -> Executable:
    """Makes a bound Program executable: a callable from local inputs to local results."""
    check_lowering(name)
    return LOWERINGS[name](program)
