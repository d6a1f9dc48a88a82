"""Applies a placement decision."""

from collections.abc import Sequence

from stepgraph.errors import PlanError, StepgraphError
from stepgraph.planning.decisions import PlacementDecision
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.program.record import Pass


def apply(
    program: Program,
    decision: PlacementDecision,
    mesh: MeshShape,
    micro_batches: int,
    passes: Sequence[Pass],
    driver: PassDriver,
) -> Program:
    """The SPMD Program of a mesh; the global one may be rewritten.

    Args:
        passes: of this room, in order, for a Program in the form that was decided on.

    Raises:
        PlanError: the placements do not fit together: a plan that was changed by hand.
    """
    try:
        return driver.through(
            passes, program, decision=decision, mesh=mesh, micro_batches=micro_batches
        )
    except (NotImplementedError, RuntimeError, ValueError, IndexError, AssertionError) as error:
        if isinstance(error, StepgraphError):
            raise
        raise PlanError(
            f"the plan's placements for program {program.name!r} cannot be carried out",
            why=f"{type(error).__name__}: {str(error)[:300]}",
            do="make the plan again; placements that are changed by hand must fit together",
        ) from error
