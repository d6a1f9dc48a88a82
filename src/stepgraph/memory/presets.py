"""The named memory policies: ``none``, ``full``, ``layers:N``, ``ops``, and patterns; those that search."""

from stepgraph.errors import UsageError, near_misses
from stepgraph.memory.patterns import are_patterns, parse_patterns
from stepgraph.planning.request import AUTO, BUDGET, NONE
from stepgraph.planning.sizes import parse_size

FULL, OPS = "full", "ops"
POLICIES = (NONE, FULL, "layers:N", OPS, "budget:SIZE", AUTO)


def parse_policy(policy: str) -> tuple[str, int]:
    """``("layers", 2)`` for ``layers:2``: of so many blocks, one is recomputed.

    The number is 1 for ``full`` and ``ops``; 0 for ``none``, for what is searched for, and for patterns,
    whose name is all of them.

    Raises:
        UsageError: unknown policy; the message lists the known ones. Or a budget that is no size.
    """
    if are_patterns(policy):
        parse_patterns(policy)
        return policy, 0
    name, _, number = policy.partition(":")
    if name in (NONE, AUTO) and not number:
        return name, 0
    if name in (FULL, OPS) and not number:
        return name, 1
    if name == "layers" and number.isdigit() and int(number) > 0:
        return name, int(number)
    if name == BUDGET and number:
        parse_size(number)
        return name, 0
    raise UsageError(f"unknown memory policy {policy!r}", do=near_misses(policy, POLICIES))


def budget_of(policy: str, budget: int | None) -> int | None:
    """Bytes that a rank may take: what a policy says, and what is said beside it; the smaller of both.

    None: neither says.
    """
    own = parse_size(policy.partition(":")[2]) if policy.startswith(f"{BUDGET}:") else None
    return min((size for size in (own, budget) if size is not None), default=None)
