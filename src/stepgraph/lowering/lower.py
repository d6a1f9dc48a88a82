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
from stepgraph.lowering.once import compiled_once
from stepgraph.program.program import Program, runnable
from stepgraph.program.randomness import RANDOM, fused_random
from stepgraph.torch_internals.code import generate_code
from stepgraph.torch_internals.inductor import compile_with_inductor

Executable = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def _lower_eager(program: Program, collectives_overlap: bool) -> Executable:
    for node in program.operations():
        node.target = runnable(node.target)
    generate_code(program.module)
    run = torch_internals.disable_compiler(program.module.forward)

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            return run(*inputs)

    return execute


# The whole step is one graph, already differentiated and scheduled, and inductor keeps its order: when it
# reorders for locality or peak memory, half of the waits end right behind their collectives.
INDUCTOR_SETTINGS: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}


def _lower_inductor(program: Program, collectives_overlap: bool) -> Executable:
    generate_code(program.module)
    examples = [node.meta["val"] for node in program.placeholders]
    with compiled_once(program.module.code):
        run = compile_with_inductor(
            program.module, examples, INDUCTOR_SETTINGS, collectives_overlap, {RANDOM: fused_random}
        )

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        return run(list(inputs))

    return execute


LOWERINGS: dict[str, Callable[[Program, bool], Executable]] = {
    "inductor": _lower_inductor,
    "eager": _lower_eager,
}


def check_lowering(name: str) -> None:
    """Raises UsageError for an unknown lowering; the message lists the known ones."""
    if name not in LOWERINGS:
        raise UsageError(f"unknown lowering {name!r}", do=near_misses(name, LOWERINGS))


def lower(program: Program, name: str, collectives_overlap: bool) -> Executable:
    """Makes a bound Program executable: a callable from local inputs to local results.

    Args:
        program: of one rank; what its collectives and waits are, and in which order, is final.
        name: of the lowering.
        collectives_overlap: False: a lowering that reorders must not let two be in flight at once.
    """
    check_lowering(name)
    return LOWERINGS[name](program, collectives_overlap)
