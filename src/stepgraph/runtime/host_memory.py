"""The memory of the machine, which the ranks on it share; and whether what they offload fits into it."""

import os
from pathlib import Path

from stepgraph.cost.memory import memory_timeline
from stepgraph.errors import MemoryPolicyError
from stepgraph.planning.decisions import MemoryDecision
from stepgraph.planning.sizes import show_bytes
from stepgraph.program.program import Program


def host_memory_bytes() -> int:
    """The machine's memory, or the limit that this process's control group has below it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def ranks_of_machine(world_size: int) -> int:
    """How many of all ranks run on this machine, as launchers say it; all, if none does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def check_host_memory(program: Program, decision: MemoryDecision | None, world_size: int) -> None:
    """That the machine has room for what its ranks offload.

    Args:
        program: of one rank.
        world_size: of all machines.

    Raises:
        MemoryPolicyError: it has not.
    """
    if decision is None or not decision.offload:
        return
    ranks, has = ranks_of_machine(world_size), host_memory_bytes()
    each = memory_timeline(program).on_host
    if ranks * each > has:
        raise MemoryPolicyError(
            f"the host has {show_bytes(has)} of memory, and {ranks} rank{'s' if ranks > 1 else ''} would "
            f"offload {show_bytes(ranks * each)} to it",
            where=f"program {program.name!r}, memory {decision.policy!r}",
            why=f"each offloads {show_bytes(each)}, until its backward or its update",
            do="offload fewer modules, recompute some (memory={'layers.*.mlp': 'recompute'}), bring fewer "
            "rows, or leave optimizer states on the device",
        )
