"""A dictionary that nobody can change: what decisions, and plans of them, are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Table(dict[Key, Value]):
    """A dictionary as a value: it reads, compares, copies, pickles and prints like one."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a decision is a value: make a new one, with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = setdefault = pop = popitem = clear = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple:
        return Table, (dict(self),)

    def __copy__(self) -> Table[Key, Value]:
        return self

    def __deepcopy__(self, memo: Any) -> Table[Key, Value]:
        return self

    def __or__(self, other: Mapping) -> Table[Key, Value]:  # type: ignore[override]
        return Table(dict(self) | dict(other))


def freeze(decision: Any) -> None:
    """Makes values of what a frozen dataclass was given: tables of dictionaries, tuples of lists."""
    for name, value in vars(decision).items():
        if isinstance(value, dict) and not isinstance(value, Table):
            object.__setattr__(decision, name, Table(value))
        elif isinstance(value, list):
            object.__setattr__(decision, name, tuple(value))
