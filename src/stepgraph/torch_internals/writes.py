"""Whether anything was written to Python objects since they were last looked through.

Comparing what a model's code read goes through hundreds of objects, which no cache holds between two steps.
Most lie in dictionaries (of modules, configurations, classes), and Python counts the writes to each: where
no count is another, nothing has to be compared. Counts, and what else is one word of an object (its class,
what is in a cell, the code of a function), are read together, so that memory is waited for once.

Python counts up to 3.12 (PEP 509). Where it does not, or has something elsewhere in memory than is looked
for, :meth:`Writes.none` never says so.
"""

import functools
import gc
import itertools
import operator
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stepgraph.torch_internals.words import Snapshot, reader, word

# Bytes into an object: its class; the count of a dictionary; what a cell holds; the attributes of what is
# made of a class in Python; how many items a list has, and where they are.
_CLASS, _COUNT, _HELD, _ATTRIBUTES = 8, 24, 16, -24
_LENGTH, _ITEMS = 16, 24
_OF_FUNCTION = {
    "__name__": 32, "__qualname__": 40, "__code__": 48, "__defaults__": 56, "__kwdefaults__": 64,
    "__dict__": 88,
}  # fmt: skip
_OF_PARTIAL = {"func": 16, "args": 24, "keywords": 32}
# Nothing of what is made of these is hidden: items, elements and attributes.
_BUILT_IN = {object, dict, list, OrderedDict, defaultdict}
_HEAP = 1 << 9  # of a type's flags: made while Python runs, so that it can be written to
_FIXED = {
    type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(...),
    types.CodeType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, property, staticmethod, classmethod,
    functools._lru_cache_wrapper, re.Pattern, weakref.ReferenceType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip


class Writes:
    """Objects that something is read from, and whether anything was written to them.

    They are to be remembered before what was read is compared: a write meanwhile must count. What was
    written to may lead to another object from then on, which is to be watched in its place.
    """

    def __init__(self) -> None:
        self._words: dict[int, tuple[Any, Callable[[Any], Any] | None]] = {}  # by address
        self._lists: dict[int, list] = {}
        self._names: dict[int, tuple[dict, dict[str, None]]] = {}
        self._known = _COUNTS
        self._read: Callable[[], Any] | None = None
        self._read_items: Callable[[], Any] | None = None
        self._items: list[int] = []  # addresses; while lists are where they were
        # Words, those of items, and what modules have under the names that are read.
        self._before: tuple[np.ndarray, bytes, list[Any]] | None = None
        self._alive: list[Any] = []  # so that nothing else gets the address of what was there

    def watch(self, value: Any) -> None:
        """An object that was read, or that something was read from."""
        if not self._known:
            return
        if isinstance(value, dict):
            self.watch_table(value)
        if isinstance(value, OrderedDict):  # another order is no write
            self._watch_word(value, _ORDER, None)
            self._known &= bool(_ORDER)
        if isinstance(value, list):
            self._lists[id(value)] = value
            self._watch_word(value, _LENGTH, None)
            self._watch_word(value, _ITEMS, None)
        if isinstance(value, torch.Tensor):
            self.watch_table(value.__dict__)  # what a tensor computes with is looked at by others
        elif isinstance(value, types.FunctionType):
            self._watch_attributes(value, _OF_FUNCTION)
        elif isinstance(value, functools.partial):
            self._watch_attributes(value, _OF_PARTIAL)
        elif isinstance(value, types.CellType):
            self._watch_word(value, _HELD, _in_cell)
        elif isinstance(value, type):
            self._watch_class(value)
            self._watch_class(type(value))
        elif isinstance(value, types.MethodType):
            self.watch(value.__func__)
        elif type(value) not in _FIXED and not isinstance(value, types.ModuleType):
            self._watch_object(value)

    def watch_table(self, table: dict) -> None:
        """What a dictionary holds, in whatever order."""
        if isinstance(table, dict):
            self._watch_word(table, _COUNT, None)
        else:
            self.unknown()

    def watch_name(self, module: types.ModuleType, name: str) -> None:
        """One name of a module: others of its names are written to by whoever runs its code."""
        table = vars(module)
        self._names.setdefault(id(table), (table, {}))[1][name] = None
        self._read = None

    def unknown(self) -> None:
        """Something was read that writes to are not seen of."""
        self._known = False

    def remember(self) -> None:
        """What there is now is what is meant."""
        self._before = None
        if not self._known:
            return
        if self._read is None:
            self._read = reader(self._addresses())
        try:
            named = self._named()
        except LookupError:  # a name is gone
            self.unknown()
            return
        self._alive = [get(owner) for owner, get in self._words.values() if get is not None]
        self._items = []
        for one in self._lists.values():
            self._alive += list.__iter__(one)  # not as its own class would have it
            start, length = word(id(one) + _ITEMS), word(id(one) + _LENGTH)
            self._items += range(start, start + 8 * length, 8)
        self._read_items = reader(self._items) if self._items else None
        items = b"" if self._read_items is None else self._read_items().tobytes()
        self._before = self._read(), items, named

    def snapshot(self) -> Snapshot | None:
        """What was remembered; None where that is not known."""
        if self._before is None or self._read is None:
            return None
        words, items, named = self._before
        alive = [[*self._words.values()], [*self._names.values()], named, self._alive]
        return Snapshot(self._addresses(), words.tobytes(), self._items, items, alive)

    def none(self) -> bool:
        """Whether nothing was written to since, as far as can be known; takes microseconds."""
        if self._before is None or self._read is None:
            return False
        words, items, named = self._before
        now = self._read()
        if now.tobytes() != words.tobytes() and not self._is_elsewhere(words, now, named):
            return False
        return self._read_items is None or self._read_items().tobytes() == items

    def _is_elsewhere(self, words: np.ndarray, now: np.ndarray, named: list[Any]) -> bool:
        """Whether modules alone were written to, and not under the names that are read."""
        others = len(self._words)
        if words[:others].tobytes() != now[:others].tobytes():
            return False
        try:
            if not _are(self._named(), named):
                return False
        except LookupError:
            return False
        words[:] = now
        return True

    def _addresses(self) -> list[int]:
        return [*self._words, *(id(table) + _COUNT for table, _ in self._names.values())]

    def _named(self) -> list[Any]:
        found: list[Any] = []
        for table, names in self._names.values():
            found += map(table.__getitem__, names)
        return found

    def _watch_word(self, owner: Any, place: int, get: Callable[[Any], Any] | None) -> None:
        """``get``: of what the word is the address; None: it is a number."""
        address = id(owner) + place
        if get is not None:
            value, there = get(owner), word(address)  # a dictionary is made when it is asked for
            if there != id(value) and (there, value) != (0, None):
                self.unknown()
        self._words[address] = owner, get
        self._read = None

    def _watch_attributes(self, value: Any, places: dict[str, int]) -> None:
        for name, place in places.items():
            self._watch_word(value, place, operator.attrgetter(name))
            if isinstance(table := getattr(value, name), dict):
                self.watch_table(table)

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
        hidden = {*cls.__mro__} - {*made, *_BUILT_IN} - _FIXED
        members = itertools.chain.from_iterable(vars(one).values() for one in made)
        if hidden or types.MemberDescriptorType in map(type, members):  # slots
            self.unknown()
        elif made:
            self._watch_class(cls)
            self._watch_word(value, _CLASS, type)
            if hasattr(value, "__dict__"):
                self.watch_table(vars(value))
                self._watch_word(value, _place_of_attributes(value), vars)
            elif not {*cls.__mro__} & _FIXED:  # of a class that is not written in Python
                self.unknown()


def _place_of_attributes(value: Any) -> int:
    """Bytes into an object of a class that is written in Python."""
    behind = -(-object.__sizeof__(value) // 8) * 8 - 8  # behind items, of numbers and tuples
    return behind if word(id(value) + behind) == id(vars(value)) else _ATTRIBUTES


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _are(now: list[Any], before: list[Any]) -> bool:
    """Whether they are the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _place_of_order() -> int:
    """Bytes into an ordered dictionary, of a count of changes of its order; 0 where there is none."""
    table, seen = OrderedDict(a=1, b=2, c=3), []
    places = range(dict.__basicsize__, OrderedDict.__basicsize__, 8)
    for key in ("a", "b", "c", "a"):
        seen.append([word(id(table) + place) for place in places])
        table.move_to_end(key)
    counted = [
        all(0 < b - a < 8 for a, b in itertools.pairwise(row)) for row in zip(*seen, strict=True)
    ]
    return next((place for place, counts in zip(places, counted, strict=True) if counts), 0)


def _counted() -> bool:
    """Whether this Python counts writes where they are looked for."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13) or sys.maxsize < 2**32:
        return False
    written, other = {"one": 1}, {"one": 1}
    read = reader([id(written) + _COUNT, id(other) + _COUNT])
    before = read()
    written["one"] = 2
    after = read()
    return bool(before[0] != after[0] and before[1] == after[1])


_COUNTS = _counted()
_ORDER = _place_of_order() if _COUNTS else 0
# Bytes into a class: its bases, in order.
_BASES = next(
    (i for i in range(8, 512, 8) if _COUNTS and word(id(Writes) + i) == id(Writes.__mro__)), 0
)
