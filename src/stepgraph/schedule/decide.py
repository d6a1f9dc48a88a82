"""Decides when each collective of a placed Program runs, and when gradients become updates."""

from __future__ import annotations

import math

from stepgraph.errors import UsageError, near_misses
from stepgraph.planning.decisions import ScheduleDecision
from stepgraph.planning.request import AUTO
from stepgraph.planning.target import Target
from stepgraph.program.program import Program
from stepgraph.schedule.buckets import Sizes, find_buckets
from stepgraph.schedule.passes.merge_small_collectives import merge_small_collectives
from stepgraph.schedule.passes.update_early import update_early
from stepgraph.schedule.updates import find_updates
from stepgraph.schedule.waits import find_waits

NONE = "none"
POLICIES = (NONE, AUTO)


def check_schedule(policy: str) -> None:
    """Raises UsageError for an unknown policy; the message lists the known ones."""
    if policy not in POLICIES:
        raise UsageError(f"unknown schedule {policy!r}", do=near_misses(policy, POLICIES))


def decide(program: Program, policy: str, target: Target) -> ScheduleDecision:
    """When each collective of a placed Program runs; the Program stays as it is.

    Args:
        policy: ``none``: as placement left them; ``auto``.
        target: what runs them.
    """
    check_schedule(policy)
    if policy == NONE:
        return ScheduleDecision(NONE)
    program = program.copy()  # what comes next is decided on what the last decision makes of it
    buckets = find_buckets(program, sizes_for(target))
    program = merge_small_collectives(program, ScheduleDecision(policy, buckets))
    left = {node.meta["name"] for node in program.operations()}
    buckets = tuple(names for names in buckets if names[0] not in left)  # one may bar another
    updates = find_updates(program)
    program = update_early(program, ScheduleDecision(policy, updates=updates))
    waits = find_waits(program, target.overlaps)
    return ScheduleDecision(policy, buckets, updates, waits)


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
