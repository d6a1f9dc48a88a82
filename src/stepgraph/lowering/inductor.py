"""``inductor``: torch's compiler on the whole program, its in-place writes included."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.lowering.once import compiled_once
from stepgraph.lowering.record import Executable, Lowering, no_obstacles
from stepgraph.planning.target import Target
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program
from stepgraph.program.randomness import RANDOM, fused_random
from stepgraph.torch_internals.code import generate_code
from stepgraph.torch_internals.inductor import compile_with_inductor

# The whole step is one graph, already differentiated and scheduled, and inductor keeps its order: when it
# reorders for locality or peak memory, half of the waits end right behind their collectives.
SETTINGS: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}


def _make(program: Program, target: Target) -> Executable:
    generate_code(program.module)
    examples = [meta(node)["val"] for node in program.placeholders]
    with compiled_once(program.module.code):
        run = compile_with_inductor(
            program.module, examples, SETTINGS, target.overlaps, {RANDOM: fused_random}
        )

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        return run(list(inputs))

    return execute


INDUCTOR = Lowering("inductor", no_obstacles, _make, fuses=True)
