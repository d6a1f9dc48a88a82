"""The named memory policies: ``none``, ``full``, ``layers:N``, ``ops``, and patterns."""

from stepgraph.errors import UsageError, near_misses
from stepgraph.memory.patterns import are_patterns, parse_patterns

NONE, OPS = "none", "ops"
POLICIES = (NONE, "full", "layers:N", OPS)


def parse_policy(policy: str) -> tuple[str, int]:
    """``("layers", 2)`` for ``layers:2``: of so many blocks, one is recomputed.

    The number is 1 for ``full`` and ``ops``, and 0 for ``none`` and patterns, whose name is all of them.

    Raises:
        UsageError: unknown policy; the message lists the known ones.
    """
    if are_patterns(policy):
        parse_patterns(policy)
        return policy, 0
    name, _, number = policy.partition(":")
    if name == NONE and not number:
        return name, 0
    if name in ("full", OPS) and not number:
        return name, 1
    if name == "layers" and number.isdigit() and int(number) > 0:
        return name, int(number)
    raise UsageError(f"unknown memory policy {policy!r}", do=near_misses(policy, POLICIES))
