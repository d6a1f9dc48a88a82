"""Compiled entry points: programs lowered for this rank, and the tensors that go in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.lowering.bind import bind_to_rank
from stepgraph.lowering.lower import Executable, lower
from stepgraph.lowering.merge import merge_small_collectives
from stepgraph.lowering.state import write_state_in_place
from stepgraph.lowering.waits import delay_waits
from stepgraph.pipeline import PassDriver
from stepgraph.program import roles
from stepgraph.program.program import Program
from stepgraph.runtime.ranks import Ranks
from stepgraph.runtime.state import State


@dataclass
class LoweredProgram:
    """One program, ready to run on this rank.

    ``arguments`` are its inputs in order, the batch's places left open; ``batch_places`` are (position
    among the arguments, leaf of the batch).
    """

    program: Program
    execute: Executable
    arguments: list[Any]
    batch_places: list[tuple[int, int]]
    outputs: list[roles.Output]

    def run(self, leaves: Sequence[Any]) -> dict[roles.Output, torch.Tensor]:
        """Runs on one (micro-)batch; state is updated in place, what remains is returned."""
        arguments = list(self.arguments)
        for position, leaf in self.batch_places:
            arguments[position] = leaves[leaf]
        return dict(zip(self.outputs, self.execute(arguments), strict=True))


def lower_for_rank(
    program: Program, lowering: str, ranks: Ranks, state: State, driver: PassDriver
) -> LoweredProgram:
    """Lowers a placed Program for this rank and collects its inputs from the state.

    The Program that is passed in stays as it is: it is what ``engine.programs`` shows.
    """
    bound = driver.run(bind_to_rank, program.copy(), ranks.rank, ranks.groups)
    bound = driver.run(merge_small_collectives, bound)
    bound = driver.run(delay_waits, bound, ranks.collectives_overlap)
    unchecked = PassDriver(keep_text=driver.keep_text, records=driver.records)
    final = unchecked.run(write_state_in_place, bound)
    execute = lower(final, lowering, ranks.collectives_overlap)
    arguments: list[Any] = []
    places: list[tuple[int, int]] = []
    for position, role in enumerate(final.inputs):
        if isinstance(role, roles.UserInput):
            places.append((position, role.index))
            arguments.append(None)
        else:
            arguments.append(state.tensors[role])
    return LoweredProgram(program, execute, arguments, places, list(final.outputs))
