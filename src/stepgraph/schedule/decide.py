"""Decides when each collective of a placed Program runs, and when gradients become updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepgraph.errors import UsageError, near_misses
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.planning.request import AUTO
from stepgraph.planning.target import Target
from stepgraph.program.program import Program
from stepgraph.schedule.buckets import Sizes, find_buckets
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


def sizes_for(target: Target) -> Sizes:
    """How large a flat collective is, by what a call costs on a target.

    A member is copied into the flat one, and out of it: above twice the bytes that are copied in the time
    of a call, a collective gains nothing from company. Reductions end in long-lived gradients, so a large
    one costs no memory; gathers bring parameters early, which does.
    """
    large = _power_of_two(2 * target.call_bytes)
    return Sizes(
        large, reduction=2 * large, gather=large, table=_power_of_two(target.call_bytes / 8)
    )


def _power_of_two(size: float) -> int:
    return 2 ** round(math.log2(max(size, 1)))
