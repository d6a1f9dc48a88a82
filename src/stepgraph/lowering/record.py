"""The record of a lowering: what it cannot do, which passes it needs, and how it makes a callable."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.planning.target import Target
from stepgraph.program.program import Program

Executable = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


@dataclass(frozen=True)
class Obstacle:
    """What keeps a Program from a lowering.

    Attributes:
        node: stable name of the operation; empty for the whole Program.
        module: path of the module that ran it.
        source: its source line, where capture knew it.
        why: the reason.
        do: what to do about it.
    """

    node: str
    module: str
    source: str
    why: str
    do: str

    def __str__(self) -> str:
        where = self.source or self.node
        return f"{self.why}{f' ({where})' if where else ''}: {self.do}"


@dataclass(frozen=True)
class Lowering:
    """One way to execute a Program.

    Attributes:
        obstacles: what it sees in a Program for a Target that it cannot execute.
        fuses: it makes one kernel of several operations.
        inner: of one that captures: the lowering that makes what is captured. Where only some operations
            are obstacles it captures the rest, in pieces.
        make: from a Program of one rank, written in place, to a callable of local tensors.
        prepare: begins what takes a while and needs no Program.
    """

    name: str
    obstacles: Callable[[Program, Target], list[Obstacle]]
    make: Callable[[Program, Target], Executable]
    fuses: bool = False
    inner: str = ""
    prepare: Callable[[Target], object] = lambda target: None


def no_obstacles(program: Program, target: Target) -> list[Obstacle]:
    """Of a lowering that takes every Program."""
    return []
