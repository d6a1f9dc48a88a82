"""``cuda_graph``: what another lowering makes of a Program, captured once and replayed.

A step's randomness and its learning rates are tensors of the device, state is written where it lives, and
batches are copied into buffers of their own: a replay does what a call would. Operations that cannot be
captured run between the pieces that can (:mod:`stepgraph.lowering.graphs.pieces`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.lowering.eager import EAGER
from stepgraph.lowering.graphs.captured import Graphed, Stage
from stepgraph.lowering.graphs.obstacles import find_obstacles, obstacles_within
from stepgraph.lowering.graphs.pieces import stretches
from stepgraph.lowering.inductor import INDUCTOR
from stepgraph.lowering.record import Executable, Lowering
from stepgraph.planning.target import Target
from stepgraph.program.collectives import is_collective
from stepgraph.program.program import Program


def _making(inner: Lowering) -> Callable[[Program, Target], Executable]:
    def make(program: Program, target: Target) -> Executable:
        refused = obstacles_within(program, target)
        communicates = any(map(is_collective, program.operations()))
        placeholders, results = [*program.placeholders], [*program.results]
        if refused:
            stages = [
                Stage(
                    (inner if part.captured else EAGER).make(part.program, target),
                    part.given,
                    part.made,
                    part.captured,
                )
                for part in stretches(program, refused)
            ]
        else:
            made = list(dict.fromkeys(node for node in results if isinstance(node, fx.Node)))
            run = inner.make(program, target)
            stages = [Stage(_each_once(run, results, made), placeholders, made, True)]
        return Graphed(program.inputs, placeholders, results, stages, communicates, program.name)

    return make


def _each_once(run: Executable, results: Sequence[Any], made: list[fx.Node]) -> Executable:
    """Of results of which one may stand in several places, each."""
    at = [results.index(node) for node in made]

    def execute(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        found = run(inputs)
        return [found[i] for i in at]

    return execute


CUDA_GRAPH = Lowering(
    "cuda_graph", find_obstacles, _making(INDUCTOR), fuses=True, inner=INDUCTOR.name
)
CUDA_GRAPH_EAGER = Lowering("cuda_graph_eager", find_obstacles, _making(EAGER), inner=EAGER.name)
