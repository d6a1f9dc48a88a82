"""One process of a machine compiles a program; its peers wait, and find it in inductor's cache.

Ranks run the same program more often than not. Compiled by all of them at once it takes the time and the
memory of all of them, for one result.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from stepgraph.torch_internals.inductor import cache_directory, caches


@contextlib.contextmanager
def compiled_once(code: str) -> Iterator[None]:
    """Around the compilation of a program; peers are processes with the same text and the same cache.

    The first to come does not wait. The others wait for it, then go on all at once: should it have failed,
    or its result not be in the cache, each compiles for itself.
    """
    with contextlib.ExitStack() as held:
        if caches():
            name = hashlib.sha256(code.encode()).hexdigest()
            lock = FileLock(Path(cache_directory(), f"{name}.stepgraph.lock"))
            with contextlib.suppress(OSError, NotImplementedError):  # files that cannot be locked
                try:
                    held.enter_context(lock.acquire(blocking=False))
                except Timeout:
                    with lock:
                        pass
        yield
