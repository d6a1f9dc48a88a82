"""Decides which forward values of a placed Program are kept for the backward."""

from __future__ import annotations

from stepgraph.analysis.blocks import find_blocks
from stepgraph.memory.presets import NONE, decide_by_preset, parse_policy
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.planning.request import AUTO
from stepgraph.program.program import Program

# What ``auto`` tries, in this order: the first whose peak fits.
CANDIDATES = (NONE, "layers:2", "full")


def check_memory(policy: str) -> None:
    """Raises UsageError for an unknown policy; the message lists the known ones."""
    if policy != AUTO:
        parse_policy(policy)


def candidates(policy: str) -> tuple[str, ...]:
    """The policies that one stands for."""
    return CANDIDATES if policy == AUTO else (policy,)


def decide(program: Program, policy: str, gather_again: bool = True) -> MemoryDecision:
    """Which forward values of a (placed) Program are recomputed; it stays as it is.

    Args:
        policy: a preset.
        gather_again: gathered parameters are not kept for the backward.

    Raises:
        UsageError: unknown policy.
        MemoryPolicyError: ``layers:N`` where no block repeats.
    """
    return decide_by_preset(program, policy, gather_again)


def decide_for_graph(program: Program, policy: str, gather_again: bool) -> MemoryDecision:
    """:func:`decide` for one graph of many: ``layers:N`` is ``none`` where no block of it repeats."""
    needs_blocks = parse_policy(policy)[0] == "layers"
    return decide(
        program, policy if not needs_blocks or find_blocks(program) else NONE, gather_again
    )
