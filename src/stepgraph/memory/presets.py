"""The named memory policies: ``none``, ``full``, ``layers:N``."""

from stepgraph.errors import UsageError, near_misses

NONE = "none"
POLICIES = (NONE, "full", "layers:N")


def parse_policy(policy: str) -> tuple[str, int]:
    """``("layers", 2)`` for ``layers:2``; the number is 1 for ``full`` and 0 for ``none``.

    Raises:
        UsageError: unknown policy; the message lists the known ones.
    """
    name, _, number = policy.partition(":")
    if name == "none" and not number:
        return name, 0
    if name == "full" and not number:
        return name, 1
    if name == "layers" and number.isdigit() and int(number) > 0:
        return name, int(number)
    raise UsageError(f"unknown memory policy {policy!r}", do=near_misses(policy, POLICIES))
