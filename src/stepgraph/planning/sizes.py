"""Sizes of memory as texts: ``70GiB``."""

import math
import re

from stepgraph.errors import UsageError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str | None) -> int | None:
    """Bytes of ``"70GiB"``, ``"512MiB"`` or a number; None stays None.

    Raises:
        UsageError: not a size, or not positive.
    """
    if size is None:
        return None
    found = None
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        found = int(float(match[1]) * _UNITS.get(match[2].lower(), 0))
    elif isinstance(size, int) and not isinstance(size, bool):
        found = size
    if found is None or found <= 0:
        raise UsageError(
            f"a memory budget is a number of bytes, or a text such as '70GiB', not {size!r}",
            why="its units are B, KiB, MiB, GiB and TiB, and KB, MB, GB and TB of a thousand",
        )
    return found


def show_bytes(size: int) -> str:
    """``1.50 GiB``, ``3.2 MiB``, ``12 KiB``."""
    scale, digits, unit = _scale(size)
    return f"{size / scale:.{digits}f} {unit}"


def show_bytes_up(size: int) -> str:
    """The same, rounded up: as a budget it is enough."""
    scale, digits, unit = _scale(size)
    return f"{math.ceil(size / scale * 10**digits) / 10**digits:.{digits}f} {unit}"


def _scale(size: int) -> tuple[int, int, str]:
    """A unit's bytes, the digits that are shown, and its name."""
    for scale, digits, unit in ((2**30, 2, "GiB"), (2**20, 1, "MiB")):
        if size >= scale:
            return scale, digits, unit
    return 2**10, 0, "KiB"
