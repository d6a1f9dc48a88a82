"""What dynamo's guards leave out of what code read: orders of dictionaries, members of classes.

A guard on an ordered dictionary compares the order in which keys came, which moving one does not change. A
guard on what a class has is on the class where it was found, whatever another one has in front of it, and a
method or a property that was followed has none at all.
"""

import re
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

_OF_A_CLASS = re.compile(r"^dict\(type\((.+)\)\.__mro__\[\d+\]\.__dict__\)\['(\w+)'\]")
_ABSENT = object()


class Unguarded:
    """Looked at beside the guards of one capture.

    Args:
        codes: of all functions that were followed.
    """

    def __init__(self, codes: Collection[types.CodeType]) -> None:
        self._codes = set(codes)
        self._orders: dict[str, list] = {}
        self._members: dict[tuple[type, str], Any] = {}
        self._seen: set[type] = set()

    def add(self, guard: Any, scope: Mapping[str, Any]) -> None:
        """What a guard says is meant in full.

        Args:
            scope: what its expression is evaluated in.
        """
        kind, of_a_class = guard.create_fn_name(), _OF_A_CLASS.match(guard.name)
        if of_a_class is None and kind not in ("DICT_KEYS_MATCH", "TYPE_MATCH"):
            return
        expression = guard.name if of_a_class is None else of_a_class[1]
        try:
            value = eval(expression, dict(scope))
        except Exception:  # a kind of source that is no expression
            return
        cls = type(value)
        if of_a_class is not None:
            self._members[cls, of_a_class[2]] = _member(cls, of_a_class[2])
        elif kind == "DICT_KEYS_MATCH" and isinstance(value, OrderedDict):
            self._orders[expression] = [*value]
        if cls not in self._seen:
            self._seen.add(cls)
            self._add_followed(cls)

    def broken(self, scope: Mapping[str, Any]) -> str:
        """The first that is not what it was, as an expression; behind guards that hold."""
        for name, keys in self._orders.items():
            if [*eval(name, dict(scope))] != keys:
                return f"list({name})"
        for (cls, name), value in self._members.items():
            if _member(cls, name) is not value:
                return f"{cls.__name__}.{name}"
        return ""

    def _add_followed(self, cls: type) -> None:
        members: dict[str, Any] = {}
        for one in reversed(cls.__mro__):
            members |= vars(one)
        for name, value in members.items():
            function = _function_of(value)
            if isinstance(function, types.FunctionType) and function.__code__ in self._codes:
                self._members[cls, name] = value


def _function_of(member: Any) -> Any:
    """A method's, whether static or a class's, or a property's."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _member(cls: type, name: str) -> Any:
    """What a class has, as it is written there."""
    return next((vars(one)[name] for one in cls.__mro__ if name in vars(one)), _ABSENT)
