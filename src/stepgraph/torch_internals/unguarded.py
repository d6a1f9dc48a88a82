"""What dynamo's guards leave out: orders of dictionaries, lists in tuples, members of classes.

A guard on an ordered dictionary compares the order in which keys came, which moving one does not change; a
guard on a tuple compares lists in it with themselves. A guard on what a class has is on the class where it
was found, whatever another one, or the object, has in front of it; of several with the very same number
only one has a guard. A method or a property that was followed has none at all.
"""

import re
import types
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from stepgraph.torch_internals.sources import code_of
from stepgraph.torch_internals.writes import Writes

_OF_A_CLASS = re.compile(r"^dict\(type\((.+)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]")
_LOOKED_INTO = {
    "DICT_KEYS_MATCH", "TYPE_MATCH", "CLASS_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH",
}  # fmt: skip
_CONSTANTS = {bool, int, float, complex, str, bytes, type(None)}
_ABSENT = object()


class Unguarded:
    """Looked at beside the guards of one capture.

    Args:
        codes: of all functions that were followed.
    """

    def __init__(self, codes: Collection[types.CodeType]) -> None:
        self._codes = set(codes)
        self._orders: dict[str, list] = {}
        self._tuples: dict[str, Any] = {}  # with something in them that can be written to
        self._hidden: set[tuple[str, str]] = set()  # objects, and values of their classes
        self._members: dict[tuple[type, str], tuple[Any, Any]] = {}  # and their code
        self._seen: dict[type, dict[str, Any]] = {}  # and what is in front of their objects
        self._of_classes = Writes()  # since members were compared

    def add(self, guard: Any, scope: dict[str, Any]) -> None:
        """What a guard says is meant in full; while the capture's values still stand.

        Args:
            scope: what its expression is evaluated in.
        """
        kind, of_a_class = guard.create_fn_name(), _OF_A_CLASS.match(guard.name)
        if kind == "NOT_PRESENT_IN_GENERIC_DICT":  # that is what its class is asked for
            self._add_value(
                guard.name, getattr(guard.create_fn, "keywords", {}).get("attr", ""), scope
            )
        elif of_a_class is not None:
            self._add_value(*of_a_class.groups(), scope)
        if kind not in _LOOKED_INTO:
            return
        value = _find(guard.name, scope)
        if kind == "DICT_KEYS_MATCH" and isinstance(value, OrderedDict):
            self._orders[guard.name] = [*value]
        elif type(value) is tuple and _can_be_written_to(value):
            self._tuples[guard.name] = _as_constants(value)
        cls = value if isinstance(value, type) else type(value)
        if cls not in self._seen:
            self._seen[cls] = _in_front(cls)
            self._add_followed(cls)

    def watch(self, writes: Writes, scope: dict[str, Any]) -> None:
        """What would have to be written to, for any to be broken."""
        self._watch_members(writes)
        places = [*self._orders, *self._tuples, *(name for name, _ in self._hidden)]
        for name in places:
            _watch(writes, _find(name, scope))

    def broken(self, scope: dict[str, Any]) -> str:
        """The first that is not what it was, as an expression; behind guards that hold."""
        for name, keys in self._orders.items():
            table = _find(name, scope)
            if not isinstance(table, OrderedDict) or [*table] != keys:
                return f"list({name})"
        for name, value in self._tuples.items():
            if _as_constants(_find(name, scope)) != value:
                return f"{name}, or what is in it"
        for name, attribute in self._hidden:
            if attribute in _attributes(_find(name, scope)):
                return f"{name}.{attribute}"
        return "" if self._of_classes.none() else self._other_member()

    def _other_member(self) -> str:
        self._of_classes = Writes()
        self._watch_members(self._of_classes)
        self._of_classes.remember()
        if other := next(self._other_members(), ""):
            self._of_classes.unknown()
            self._of_classes.remember()
        return other

    def _other_members(self) -> Iterator[str]:
        for (cls, name), (member, code) in self._members.items():
            now = _member(cls, name)
            if now is not member or _code_of(now) is not code:
                yield f"{cls.__name__}.{name}"
        for cls, before in self._seen.items():
            in_front = _in_front(cls)
            for name in {**before, **in_front}:
                if in_front.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    yield f"{cls.__name__}.{name}"

    def _watch_members(self, writes: Writes) -> None:
        for cls in self._seen:
            writes.watch(cls)
        for value, _ in self._members.values():
            if type(function := _function_of(value)) is types.FunctionType:
                writes.watch_function(function)

    def _add_value(self, owner: str, name: str, scope: dict[str, Any]) -> None:
        """Of its class, that an object is asked for."""
        value = _find(owner, scope)
        self._add_member(type(value), name)
        if name not in _attributes(value):
            self._hidden.add((owner, name))

    def _add_followed(self, cls: type) -> None:
        torchs = vars(
            torch.nn.Module
        )  # torch itself replaces those, when it begins to trace for one
        for name in {name for one in cls.__mro__ for name in vars(one)}:
            special = name.startswith("__") and _member(cls, name) is torchs.get(name)
            if not special and _code_of(_member(cls, name)) in self._codes:
                self._add_member(cls, name)

    def _add_member(self, cls: type, name: str) -> None:
        member = _member(cls, name)
        self._members[cls, name] = member, _code_of(member)


def _find(expression: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(code_of(expression), scope)
    except Exception:  # a kind of source that is no expression; or it is gone
        return _ABSENT


def _as_constants(value: Any) -> Any:
    """What a tuple holds, at any depth, as far as it is constant."""
    if type(value) in (tuple, list):
        return type(value), tuple(map(_as_constants, value))
    if type(value) is dict:
        return dict, tuple((key, _as_constants(one)) for key, one in value.items())
    if type(value) is set:
        return set, frozenset(value)
    return value if type(value) in _CONSTANTS else type(value)


def _can_be_written_to(value: Any) -> bool:
    """Whether there is something in a tuple, at any depth, that is neither one nor a constant."""
    if type(value) is tuple:
        return any(map(_can_be_written_to, value))
    return type(value) in (list, dict, set)


def _watch(writes: Writes, value: Any) -> None:
    writes.watch(value)
    if isinstance(value, set):
        writes.unknown()
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, (tuple, list, dict, set)):
                _watch(writes, one)


def _in_front(cls: type) -> dict[str, Any]:
    """What an object's class is asked before the object itself, and what is asked for all names."""
    ways = {"__getattribute__", "__getattr__"}
    return {
        name: value
        for one in reversed(cls.__mro__)
        for name, value in vars(one).items()
        if name in ways or hasattr(type(value), "__set__")
    }


def _attributes(value: Any) -> Mapping[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):  # it has none, or hides it
        return {}


def _code_of(member: Any) -> types.CodeType | None:
    function = _function_of(member)
    return function.__code__ if type(function) is types.FunctionType else None


def _function_of(member: Any) -> Any:
    """A method's, whether static or a class's, or a property's; by what a member is, not what it says."""
    cls = type(member)
    if issubclass(cls, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if issubclass(cls, property) else member


def _member(cls: type, name: str) -> Any:
    """What a class has, as it is written there."""
    return next((vars(one)[name] for one in cls.__mro__ if name in vars(one)), _ABSENT)
