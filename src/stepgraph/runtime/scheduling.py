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
    takes an eighth of the time (``benchmarks/collective_latency.py``). Threads inherit the policy of the
    one that starts them; this one's is as before afterwards.

    Args:
        device_type: of what computes; for an accelerator nothing is done.

    Returns:
        whether they do. They do not where the system has no such policy, or does not allow it (Linux asks
        for CAP_SYS_NICE).
    """
    if device_type != torch_internals.host_device().type or not hasattr(os, "sched_setscheduler"):
        yield False
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
    try:
        os.sched_setscheduler(0, os.SCHED_RR, lowest)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, parameters)
