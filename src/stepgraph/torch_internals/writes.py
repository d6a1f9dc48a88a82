"""Whether anything was written to Python objects since they were last looked through.

Comparing what a model's code read goes through hundreds of objects, which no cache holds between two steps.
Most lie in dictionaries (of modules, configurations), and Python counts the writes to each: where no count
is another, nothing has to be compared. To a class it gives another number after a write to it or to a base.
Counts, numbers, and what else is one word of an object (its class, what is in a cell, the code of a
function), are read together, so that memory is waited for once.

Python counts up to 3.12 (PEP 509). Where it does not, or has something elsewhere in memory than is looked
for, :meth:`Writes.none` never says so.
"""

import contextlib
import functools
import itertools
import operator
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from stepgraph.torch_internals.words import Reader, Snapshot, word

# Bytes into an object: its class; the count of a dictionary; what a cell holds; the attributes of what is
# made of a class in Python; how many items a list has, and where they are.
_CLASS, _COUNT, _HELD, _ATTRIBUTES = 8, 24, 16, -24
_LENGTH, _ITEMS = 16, 24
_OF_FUNCTION = {
    "__name__": 32, "__qualname__": 40, "__code__": 48, "__defaults__": 56, "__kwdefaults__": 64,
    "__dict__": 88,
}  # fmt: skip
_WRITTEN_ONCE = {"__closure__", "__globals__", "__func__", "__self__"}
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
        self._classes: dict[int, type] = {}
        self._lists: dict[int, list] = {}
        self._names: dict[int, tuple[dict, dict[str, None]]] = {}
        self._known = _COUNTS
        self._addresses: list[int] = []
        self._read = self._read_items = Reader(())
        self._items: list[int] = []  # addresses; while lists are where they were
        # Words, those of items, and what modules have under the names that are read.
        self._before: tuple[bytes, bytes, list[Any]] | None = None
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
        if isinstance(value, defaultdict):
            self._watch_word(value, dict.__basicsize__, operator.attrgetter("default_factory"))
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
            self.watch_function(value)
        elif type(value) not in _FIXED and not isinstance(value, types.ModuleType):
            self._watch_object(value)

    def watch_table(self, table: dict) -> None:
        """What a dictionary holds, in whatever order."""
        if isinstance(table, dict):
            self._watch_word(table, _COUNT, None)
        else:
            self.unknown()

    def watch_function(
        self, value: types.FunctionType | types.MethodType, name: str = "__code__"
    ) -> None:
        """One attribute of a function is read, or that it is called."""
        function = value.__func__ if isinstance(value, types.MethodType) else value
        if name not in _WRITTEN_ONCE and isinstance(function, types.FunctionType):
            places = {name: _OF_FUNCTION[name]} if name in _OF_FUNCTION else _OF_FUNCTION
            self._watch_attributes(function, places)
        elif name not in _WRITTEN_ONCE:
            self.watch(function)

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
        leaves = self._leaves()
        if not all(_version(cls, _VERSION) for cls in leaves):
            self.unknown()
            return
        classes = (id(cls) + _VERSION for cls in leaves)
        names = (id(table) + _COUNT for table, _ in self._names.values())
        addresses = [*self._words, *classes, *names]
        if addresses != self._addresses:
            self._addresses, self._read = addresses, Reader(addresses)
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
        self._read_items = Reader(self._items)
        self._before = bytes(self._read()), bytes(self._read_items()), named

    def snapshot(self) -> Snapshot | None:
        """What was remembered; None where that is not known."""
        if self._before is None:
            return None
        words, items, named = self._before
        alive = [[*each.values()] for each in (self._words, self._names, self._classes)]
        return Snapshot(self._addresses, words, self._items, items, [*alive, named, self._alive])

    def none(self) -> bool:
        """Whether nothing was written to since, as far as can be known; takes microseconds."""
        if self._before is None:
            return False
        words, items, named = self._before
        now = self._read()
        if now != words and not self._is_elsewhere(words, now, named):
            return False
        return self._read_items() == items

    def _is_elsewhere(self, words: bytes, now: bytearray, named: list[Any]) -> bool:
        """Whether modules alone were written to, and not under the names that are read."""
        others = len(words) - 8 * len(self._names)
        if words[:others] != now[:others]:
            return False
        try:
            if not _are(self._named(), named):
                return False
        except LookupError:
            return False
        self._before = bytes(now), self._before[1], named
        return True

    def _leaves(self) -> list[type]:
        """Classes that no other one is made from: what is written to a base counts for them as well."""
        bases = {id(base) for cls in self._classes.values() for base in cls.__mro__[1:]}
        return [cls for number, cls in self._classes.items() if number not in bases]

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

    def _watch_attributes(self, value: Any, places: dict[str, int]) -> None:
        for name, place in places.items():
            self._watch_word(value, place, operator.attrgetter(name))
            if isinstance(table := getattr(value, name), dict):
                self.watch_table(table)

    def _watch_class(self, cls: type) -> None:
        self._classes.update((id(one), one) for one in cls.__mro__ if one.__flags__ & _HEAP)

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


def _version(cls: type, place: int) -> int:
    """Python's number of what a class is, which the next write to it, or to its bases, takes away; or 0."""
    if not (number := word(id(cls) + place) & 0xFFFFFFFF):
        with contextlib.suppress(AttributeError):  # looking anything up gives it one
            type.__getattribute__(cls, "looked up")
        number = word(id(cls) + place) & 0xFFFFFFFF
    return number


def _place_of_version() -> int:
    """Bytes into a class, of that number; 0 where there is none."""
    base, places = type("Base", (), {}), range(8, type.__basicsize__, 8)
    below, seen, written = type("Below", (base,), {}), [], []
    for number in range(3):
        seen.append([_version(below, place) for place in places])
        base.written = number
        written.append([word(id(below) + place) & 0xFFFFFFFF for place in places])
    rows = zip(places, zip(*seen, strict=True), zip(*written, strict=True), strict=True)
    return next(
        (place for place, given, gone in rows if len({*given, 0}) == 4 and not any(gone)), 0
    )


def _counted() -> bool:
    """Whether this Python counts writes where they are looked for."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13) or sys.maxsize < 2**32:
        return False
    written, other = {"one": 1}, {"one": 1}
    words = word(id(written) + _COUNT), word(id(other) + _COUNT)
    written["one"] = 2
    return word(id(written) + _COUNT) != words[0] and word(id(other) + _COUNT) == words[1]


_VERSION = _place_of_version() if _counted() else 0
_COUNTS = bool(_VERSION)
_ORDER = _place_of_order() if _COUNTS else 0
