"""Single words of this process's memory, many in one gather: memory is waited for once."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def word(address: int) -> int:
    """Eight bytes of an object that is alive."""
    return ctypes.c_uint64.from_address(address).value


def reader(addresses: Sequence[int]) -> Callable[[], Any]:
    """Reads words of objects that are alive, as an array.

    Args:
        addresses: multiples of eight apart.
    """
    if not addresses:
        return lambda: np.empty(0, np.uint64)
    where = np.array(addresses, dtype=np.int64)
    start, words = int(where.min()), int(where.max() - where.min()) // 8 + 1
    memory = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(start))
    return functools.partial(memory.take, (where - start) // 8)
