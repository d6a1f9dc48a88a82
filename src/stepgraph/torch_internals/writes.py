"""Whether anything was written to Python objects since they were last looked through.

Comparing what a model's code read goes through hundreds of objects, which no cache holds between two steps.
Most lie in dictionaries (of modules, configurations, classes), and Python counts the writes to each: where
no count is another, nothing has to be compared. Counts, and what else is one word of an object (its class,
what is in a cell, the code of a function), are read together, so that memory is waited for once.

Python counts up to 3.12 (PEP 509). Where it does not, or has something elsewhere in memory than is looked
for, :meth:`Writes.none` never says so.
"""

import ctypes
import functools
import gc
import operator
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# Bytes into an object: its class; the count of a dictionary; what a cell holds; of a function its code,
# defaults and defaults of keywords; the attributes of what is made of a class in Python.
_CLASS, _COUNT, _HELD, _CODE, _ATTRIBUTES = 8, 24, 16, (48, 56, 64), -24
# Nothing of what is made of these is hidden: items, elements and attributes.
_BUILT_IN = {object, dict, list, OrderedDict, defaultdict}
_HEAP = 1 << 9  # of a type's flags: made while Python runs, so that it can be written to
_FIXED = (
    type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(...),
    types.CodeType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, property, staticmethod, classmethod,
    functools.partial, functools._lru_cache_wrapper, re.Pattern, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_OF_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Writes:
    """Objects that something is read from, and whether anything was written to them.

    What was written to may lead to another object from then on, which is to be watched in its place.
    """

    def __init__(self) -> None:
        self._words: dict[int, tuple[Any, Callable[[Any], Any] | None]] = {}  # by address
        self._lists: dict[int, list | OrderedDict] = {}
        self._names: dict[int, tuple[dict, dict[str, None]]] = {}
        self._known = _COUNTS
        self._read: Callable[[], Any] | None = None
        self._before: tuple[bytes, list[Any]] | None = None
        self._alive: list[Any] = []  # so that nothing else gets the address of what was there

    def watch(self, value: Any) -> None:
        """An object that was read, or that something was read from."""
        if isinstance(value, dict):
            self.watch_table(value)
        if isinstance(value, (list, OrderedDict)):  # another order is no write
            self._lists[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.watch_table(value.__dict__)  # what a tensor computes with is looked at by others
        elif isinstance(value, types.FunctionType):
            for number, place in enumerate(_CODE):
                self._watch_word(value, place, lambda f, number=number: _OF_FUNCTION(f)[number])
            self.watch_table(value.__dict__)
        elif isinstance(value, types.CellType):
            self._watch_word(value, _HELD, _in_cell)
        elif isinstance(value, type):
            self._watch_class(value)
            self._watch_class(type(value))
        elif isinstance(value, types.MethodType):
            self.watch(value.__func__)
        elif not isinstance(value, _FIXED):
            self._watch_object(value)

    def watch_table(self, table: dict) -> None:
        """What a dictionary holds, in whatever order."""
        self._watch_word(table, _COUNT, None)

    def watch_name(self, module: types.ModuleType, name: str) -> None:
        """One name of a module: others of its names are written to by whoever runs its code."""
        table = vars(module)
        self._names.setdefault(id(table), (table, {}))[1][name] = None

    def unknown(self) -> None:
        """Something was read that writes to are not seen of."""
        self._known = False

    def remember(self) -> None:
        """What there is now is what is meant."""
        self._before = None
        if not self._known:
            return
        if self._read is None:
            self._read = _reader([*self._words])
        try:
            found = self._found()
        except LookupError:  # a name is gone
            self.unknown()
            return
        self._alive = [get(owner) for owner, get in self._words.values() if get is not None]
        self._before = self._read().tobytes(), found

    def none(self) -> bool:
        """Whether nothing was written to since, as far as can be known; takes microseconds."""
        if self._before is None or self._read is None:
            return False
        words, found = self._before
        if self._read().tobytes() != words:
            return False
        try:
            now = self._found()
        except LookupError:
            return False
        return len(now) == len(found) and all(map(operator.is_, now, found))

    def _found(self) -> list[Any]:
        found: list[Any] = []
        for one in self._lists.values():
            found += one
        for table, names in self._names.values():
            found += map(table.__getitem__, names)
        return found

    def _watch_word(self, owner: Any, place: int, get: Callable[[Any], Any] | None) -> None:
        """``get``: of what the word is the address; None: it is a number."""
        address = id(owner) + place
        if get is not None:
            there, value = _word(address), get(owner)
            if there != id(value) and (there, value) != (0, None):
                self.unknown()
        self._words[address] = owner, get
        self._read = None

    def _watch_class(self, cls: type) -> None:
        for one in cls.__mro__:
            if one.__flags__ & _HEAP:
                # The dictionary that vars() shows.
                tables = gc.get_referents(vars(one))
                self.watch_table(next(table for table in tables if isinstance(table, dict)))
                self._watch_word(one, _BASES, operator.attrgetter("__mro__"))

    def _watch_object(self, value: Any) -> None:
        cls = type(value)
        made = [one for one in cls.__mro__ if one.__flags__ & _HEAP and one not in _BUILT_IN]
        hidden = {*cls.__mro__} - {*made, *_BUILT_IN}
        slots = any(vars(one).get("__slots__") for one in made)
        if hidden or slots or (made and not hasattr(value, "__dict__")):
            self.unknown()
        elif made:
            self.watch_table(vars(value))
            self._watch_word(value, _CLASS, type)
            self._watch_word(value, max(cls.__dictoffset__, 0) or _ATTRIBUTES, vars)
            self._watch_class(cls)


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _reader(addresses: list[int]) -> Callable[[], Any]:
    """Reads words of memory, of objects that are alive."""
    if not addresses:
        return lambda: np.empty(0)
    where = np.array(addresses, dtype=np.int64)
    start, words = int(where.min()), int(where.max() - where.min()) // 8 + 1
    memory = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(start))
    return functools.partial(memory.take, (where - start) // 8)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _counted() -> bool:
    """Whether this Python counts writes where they are looked for."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13) or sys.maxsize < 2**32:
        return False
    written, other = {"one": 1}, {"one": 1}
    read = _reader([id(written) + _COUNT, id(other) + _COUNT])
    before = read()
    written["one"] = 2
    after = read()
    return bool(before[0] != after[0] and before[1] == after[1])


_COUNTS = _counted()
# Bytes into a class: its bases, in order.
_BASES = next(
    (i for i in range(8, 512, 8) if _COUNTS and _word(id(Writes) + i) == id(Writes.__mro__)), 0
)
