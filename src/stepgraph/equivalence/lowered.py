"""Runs the code that a lowering makes of every rank's Program, all ranks in one process.

Each rank is a thread. Where its code comes to a collective it meets the others, and the last to come
computes it for all: as the interpreter of Programs does, so that what is compared is the code between.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.equivalence.lockstep import compute_collective
from stepgraph.equivalence.values import GlobalValues
from stepgraph.lowering.apply import lower
from stepgraph.lowering.passes.name_groups import name_groups
from stepgraph.lowering.presets import LOWERINGS
from stepgraph.lowering.record import Executable
from stepgraph.pipeline import LOWERED
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.planning.target import Target
from stepgraph.program.collectives import is_collective
from stepgraph.program.driver import PassDriver
from stepgraph.program.metadata import meta, set_meta
from stepgraph.program.program import Program
from stepgraph.program.record import Results

_PATIENCE = 600.0  # seconds that a rank waits for the others at a collective
# By number, while they last: what an operator is told is a number.
_meetings: dict[int, _Meeting] = {}


class _Meeting:
    """Where ranks exchange what they bring to a collective."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.nodes = [list(filter(is_collective, program.operations())) for program in programs]
        self.barrier = threading.Barrier(len(programs), self._compute, _PATIENCE)
        self.brought: list[Any] = [None] * len(programs)
        self.answers: list[Any] = []
        self.mesh = programs[0].mesh

    def exchange(self, rank: int, number: int, value: torch.Tensor) -> torch.Tensor:
        """The result of a collective on one rank."""
        self.brought[rank] = (number, value)
        self.barrier.wait()
        return self.answers[rank]

    def joined_by(self, code: Executable) -> Executable:
        """The code of a rank, whose failure ends the others' waiting."""

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
            try:
                return code(inputs)
            except BaseException:
                self.barrier.abort()
                raise

        return run

    def _compute(self) -> None:
        nodes = [self.nodes[rank][number] for rank, (number, _) in enumerate(self.brought)]
        values = [value for _, value in self.brought]
        self.answers = compute_collective(nodes, values, self.mesh)


@torch.library.custom_op("stepgraph::meet", mutates_args=())
def meet(
    value: torch.Tensor, shape: Sequence[int], meeting: int, rank: int, number: torch.Tensor
) -> torch.Tensor:
    """Collective ``number`` (a tensor: repeated blocks are one code) of a rank's program, among threads."""
    return _meetings[meeting].exchange(rank, int(number), value).clone()


@meet.register_fake
def _(value, shape, meeting, rank, number):
    return value.new_empty(list(shape))


MEET = torch.ops.stepgraph.meet.default


def run_lowered(
    values: GlobalValues, bound: Sequence[Program], name: str, target: Target
) -> Results:
    """All global results of every rank's Program, run as a lowering makes it.

    Args:
        bound: for every rank its own; they stay as they are.
        name: of the lowering; of one that captures, what it captures is run.
    """
    name = LOWERINGS[name].inner or name
    meeting = _Meeting(bound)
    number = id(meeting)
    _meetings[number] = meeting
    try:
        fuses = LOWERINGS[name].fuses
        ranks = [_meeting_others(p, number, rank, fuses) for rank, p in enumerate(bound)]
        codes = [lower(program, LoweringDecision(name), target) for program in ranks]
        return values.run_all(bound, [meeting.joined_by(code) for code in codes])
    finally:
        del _meetings[number]


def _meeting_others(program: Program, meeting: int, rank: int, fuses: bool) -> Program:
    """A copy that writes its state in place, and meets other threads in place of other processes."""
    program = program.copy()
    for index, node in enumerate(list(filter(is_collective, program.operations()))):
        shape = list(meta(node)["val"].shape)
        number = _constant(program, node, f"collective_{index}", torch.tensor(index))
        meta(node)["stands_for"] = node.target
        node.target, node.args = MEET, (node.args[0], shape, meeting, rank, number)
        (wait,) = node.users
        wait.replace_all_uses_with(node)
        program.graph.erase_node(wait)
    passes = [step for step in LOWERED if step is not name_groups]  # there are no groups
    return PassDriver().through(passes, program, fuses=fuses)


def _constant(program: Program, before: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """A tensor that the program holds."""
    program.module.register_buffer(name, value)
    with program.graph.inserting_before(before):
        node = program.graph.get_attr(name)
    set_meta(node, {"val": meta(before)["val"].new_empty((), dtype=value.dtype), "name": name})
    return node
