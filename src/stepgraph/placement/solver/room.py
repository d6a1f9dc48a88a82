"""What a solver may hold of a step's programs, limit after limit."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Room:
    """What a solver may hold, and what it knows from within other limits (:func:`dataclasses.replace`).

    Of one step's programs, asked the same: each solution begins where the last one ended.

    Attributes:
        limit: bytes of one rank for parameters, gradients, optimizer states and what is kept for the
            backward together; None: as many as there are.
        hasty: the limit is an estimate, and a first answer will do
            (:func:`stepgraph.placement.solver.optimise.solve`).
        says_least: where nothing fits, it is to be said what would.
        solvers: of each program.
    """

    limit: int | None = None
    hasty: bool = False
    says_least: bool = True
    solvers: dict[Any, Any] = field(default_factory=dict, repr=False)
