"""Compiled entry points: programs lowered for this rank, and the tensors that go in and out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.lowering.apply import lower
from stepgraph.lowering.partition import forward_and_backward
from stepgraph.lowering.record import Executable
from stepgraph.pipeline import executed
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.program import roles
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.runtime.state import State


@dataclass
class LoweredProgram:
    """One program, ready to run on this rank.

    ``arguments`` are its inputs in order, the places of what each call brings left open: ``batch_places``
    are (position among the arguments, leaf of the batch), ``other_places`` (position, role). ``buffers``
    are those among the arguments.
    """

    program: Program
    execute: Executable
    arguments: list[Any]
    batch_places: list[tuple[int, int]]
    other_places: list[tuple[int, roles.Input]]
    outputs: list[roles.Output]
    buffers: dict[str, torch.Tensor]

    def run(
        self, leaves: Sequence[Any] = (), brought: Mapping[roles.Input, torch.Tensor] | None = None
    ) -> dict[roles.Output, torch.Tensor]:
        """Runs on one (micro-)batch; state is updated in place, what remains is returned.

        ``brought``: what else the call brings: tangents, gradients, saved values.
        """
        arguments = list(self.arguments)
        # Programs are compiled for contiguous inputs; what a caller brings may be any view.
        for position, leaf in self.batch_places:
            arguments[position] = leaves[leaf].contiguous()
        for position, role in self.other_places:
            value = (brought or {})[role]
            saved = isinstance(role, roles.Saved)  # by a program, with the strides that it promised
            arguments[position] = value if saved else value.contiguous()
        return dict(zip(self.outputs, self.execute(arguments), strict=True))


def lower_for_rank(
    program: Program, decision: LoweringDecision, state: State, driver: PassDriver, in_two: bool
) -> list[LoweredProgram]:
    """Lowers a bound Program for this rank; ``in_two``: forward and backward each by itself.

    The Program that is passed in stays as it is: it is what ``engine.programs`` shows.
    """
    final = executed(program, state.ranks.groups, driver)
    sides = forward_and_backward(final) if in_two else [final]
    return [_lowered(program, side, decision, state) for side in sides]


def _lowered(
    program: Program, final: Program, decision: LoweringDecision, state: State
) -> LoweredProgram:
    """A final form of a Program as a callable, with its inputs from the state."""
    execute = lower(final, decision, state.ranks.target)
    arguments: list[Any] = []
    batch: list[tuple[int, int]] = []
    others: list[tuple[int, roles.Input]] = []
    for position, role in enumerate(final.inputs):
        if isinstance(role, roles.UserInput):
            batch.append((position, role.index))
        elif isinstance(role, roles.BROUGHT):
            others.append((position, role))
        arguments.append(None if isinstance(role, roles.BROUGHT) else state.tensors[role])
    buffers = {r.name: state.tensors[r] for r in final.inputs if isinstance(r, roles.Buffer)}
    return LoweredProgram(program, execute, arguments, batch, others, list(final.outputs), buffers)
