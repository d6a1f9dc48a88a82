"""Decides when each collective of a placed Program runs, and when gradients become updates.

A collective starts where placement put it: a reduction right behind the value that it reduces, so a
gradient's as soon as the backward has the gradient. Those of one bucket start together, where the last of
them stands (the first, where somebody reads one before), and each completes right before its first reader.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepgraph.errors import UsageError, near_misses
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.planning.request import AUTO
from stepgraph.planning.target import Target
from stepgraph.program.program import Program
from stepgraph.schedule.buckets import find_buckets, sizes_for
from stepgraph.schedule.updates import find_updates
from stepgraph.schedule.waits import find_waits

NONE = "none"
POLICIES = (NONE, AUTO)

# What ``auto`` decides for each pass of the room, on what the pass before has made of the Program.
FINDERS: dict[str, tuple[str, Callable[[Program, Target], Any]]] = {
    "merge_small_collectives": ("buckets", lambda p, target: find_buckets(p, sizes_for(target))),
    "update_early": ("updates", lambda p, target: find_updates(p)),
    "delay_waits": ("waits", lambda p, target: find_waits(p, target.overlaps)),
}


def check_schedule(policy: str) -> None:
    """Raises UsageError for an unknown policy; the message lists the known ones."""
    if policy not in POLICIES:
        raise UsageError(f"unknown schedule {policy!r}", do=near_misses(policy, POLICIES))


def decide_for(
    name: str, program: Program, decision: ScheduleDecision, target: Target
) -> ScheduleDecision:
    """A decision with what concerns one pass; the Program, on which it will run next, stays as it is."""
    if decision.policy == NONE or name not in FINDERS:
        return decision
    part, find = FINDERS[name]
    return replace(decision, **{part: find(program, target)})
