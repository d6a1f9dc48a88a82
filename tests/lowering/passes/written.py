"""Programs as a pass finds them that joins what is executed."""

from collections.abc import Callable

from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.program.program import Program
from stepgraph.program.record import Pass
from tests.schedule.rescheduled import rescheduled
from tests.support import bound


def written(
    fuse: Callable[..., Program], program: Program, *passes: Pass
) -> tuple[list[Program], list[Program]]:
    """Every rank's own Program, scheduled and written in place, before and after."""
    before = [write_state_in_place(p) for p in bound(rescheduled(program, *passes))]
    return before, [fuse(each.copy(), fuses=True) for each in before]
