"""Which of a rank's threads go first, where ranks compute on the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from stepgraph import torch_internals


@contextlib.contextmanager
def communication_first(device_type: str) -> Iterator[bool]:
    """Threads that a process group starts inside are run as soon as they can, before those that compute.

    On the host both share the cores, and by Linux's usual policy a thread of gloo's that is woken may wait
    for milliseconds until it runs: where it does not, a small all-reduce between two pieces of compute
    takes an eighth of the time in the mean (``benchmarks/collective_latency.py``). Threads inherit the
    policy of the one that starts them (so do those that gloo's start, such as OpenMP's where a rank has
    several threads); this one's is as before afterwards.

    Args:
        device_type: of what computes; for an accelerator nothing is done.

    Returns:
        whether they do. They do not where the system has no such policy, or does not allow it (Linux asks
        for CAP_SYS_NICE), or where this thread has a policy that somebody chose.
    """
    restored = _raised() if device_type == torch_internals.host_device().type else None
    try:
        yield restored is not None
    finally:
        if restored is not None:
            os.sched_setscheduler(0, *restored)


def _raised() -> tuple[int, os.sched_param] | None:
    """Gives this thread the lowest real-time priority; what it had before, or None: it has that still."""
    with contextlib.suppress(AttributeError, OSError):  # not on this system; not allowed
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        if before[0] == os.SCHED_OTHER:
            lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
            os.sched_setscheduler(0, os.SCHED_RR, lowest)
            return before
    return None
