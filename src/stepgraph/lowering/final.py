"""What a rank runs of a placed Program: this room's passes, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepgraph.lowering.passes.bind_to_rank import bind_to_rank
from stepgraph.lowering.passes.write_state_in_place import write_state_in_place
from stepgraph.program.driver import Pass, PassDriver
from stepgraph.program.program import Program
from stepgraph.schedule.passes.delay_waits import delay_waits
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early


def passes_of_a_rank(collectives_overlap: bool) -> list[tuple[Pass, tuple[Any, ...]]]:
    """What follows ``bind_to_rank``, with arguments; after the last, a Program is not functional."""
    return [
        (merge_small_collectives, ()),
        (update_early, ()),
        (delay_waits, (collectives_overlap,)),
        (write_state_in_place, ()),
    ]


def final_form(
    program: Program,
    rank: int,
    groups: Mapping[str, str],
    collectives_overlap: bool,
    driver: PassDriver,
) -> Program:
    """What a rank runs of a placed Program, which stays as it is.

    Args:
        groups: names of mesh dimensions -> names of the rank's process groups.
    """
    final = driver.run(bind_to_rank, program.copy(), rank, groups)
    *functional, (write, settings) = passes_of_a_rank(collectives_overlap)
    for rewrite, arguments in functional:
        final = driver.run(rewrite, final, *arguments)
    unchecked = PassDriver(keep_text=driver.keep_text, records=driver.records)
    return unchecked.run(write, final, *settings)


def foreseen(program: Program, collectives_overlap: bool) -> Program:
    """:func:`final_form` of the first rank where no ranks run: what a prediction is made from.

    Its groups have the names of their mesh dimensions.
    """
    assert program.mesh is not None
    groups = {name: name for name in program.mesh.names}
    return final_form(program, 0, groups, collectives_overlap, PassDriver())
