"""What takes longer than some seconds says what it is, on standard error, on the first rank.

``STEPGRAPH_PROGRESS=0`` in the environment turns it off.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

VARIABLE = "STEPGRAPH_PROGRESS"
PATIENCE = 5.0  # seconds before the first line
AGAIN = 30.0  # seconds between the lines after it


_going_on: list[str] = []


def busy() -> bool:
    """Whether something goes on in this process that says so itself."""
    return bool(_going_on)


def say(text: str) -> None:
    """One line on standard error, unless that is turned off."""
    if os.environ.get(VARIABLE, "1") != "0":
        print(f"stepgraph: {text}", file=sys.stderr, flush=True)


@contextmanager
def doing(text: str) -> Iterator[None]:
    """Within it, what ``text`` names goes on: it is said if it takes long, and then how long it took."""
    rank = str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")
    if rank != "0":
        yield
        return
    start, done, said = time.monotonic(), threading.Event(), False

    def wait() -> None:
        nonlocal said
        while not done.wait(AGAIN if said else PATIENCE):
            say(f"{text} ({time.monotonic() - start:.0f} s so far)" if said else f"{text} ...")
            said = True

    threading.Thread(target=wait, name="stepgraph progress", daemon=True).start()
    _going_on.append(text)
    try:
        yield
    finally:
        done.set()
        _going_on.remove(text)
        if said:
            say(f"{text}: {time.monotonic() - start:.0f} s")


class Stages(ExitStack):
    """What goes on in stages, each of which ends the one before."""

    def begin(self, text: str) -> None:
        """A stage begins."""
        self.close()
        self.enter_context(doing(text))
