"""Reading plain data that nobody vouches for: every question names the place it asks about.

Nothing is made from a number in the data before the number is known to be small enough.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepgraph.planning.folding import unfold

LARGEST_FILE = 64 * 2**20
LARGEST_INTEGER = 2**63 - 1
MOST_NAMES = 2_000_000
LONGEST_TEXT = 4096
_TYPE = r"\w{1,40}\[(\d{1,18}(, \d{1,18}){0,63})?\]"
_TYPES = re.compile(rf"{_TYPE}(, {_TYPE})*")


class MalformedError(Exception):
    """Data that is not what it should be; ``where`` is its path: ``placements.step.inputs``."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(problem)
        self.where, self.problem = where, problem


class Item:
    """One value in the data.

    Args:
        value: plain data, as ``json.loads`` gives it.
        where: its path, for messages.
        names_left: how many names may still be made (shared by all items of one file).
    """

    def __init__(self, value: Any, where: str = "", names_left: list[int] | None = None) -> None:
        self.value, self.where = value, where
        self.names_left = names_left if names_left is not None else [MOST_NAMES]

    def refuse(self, problem: str) -> MalformedError:
        """The error for this place."""
        return MalformedError(self.where or "the file", problem)

    def of(self, kind: type, name: str) -> Any:
        """The value, if it is of a type."""
        if not isinstance(self.value, kind) or (isinstance(self.value, bool) and kind is not bool):
            raise self.refuse(f"{name} is expected, not {_shown(self.value)}")
        return self.value

    def field(self, name: str) -> Item:
        """A field of an object, which must be there."""
        found = self.of(dict, "an object")
        if name not in found:
            raise self.refuse(f"there is no field {name!r}")
        return self._inside(found[name], name)

    def optional(self, name: str) -> Item | None:
        """A field of an object; None where it is missing or null."""
        found = self.of(dict, "an object").get(name)
        return None if found is None else self._inside(found, name)

    def fields(self) -> Iterator[tuple[str, Item]]:
        """All fields of an object."""
        for name, value in self.of(dict, "an object").items():
            yield name, self._inside(value, name)

    def items(self, count: int | None = None) -> list[Item]:
        """The elements of a list, of a given length if one is given."""
        found = self.of(list, "a list")
        if count is not None and len(found) != count:
            raise self.refuse(f"{count} elements are expected, not {len(found)}")
        return [self._inside(value, str(i)) for i, value in enumerate(found)]

    def text(self) -> str:
        """A string of reasonable length."""
        found = self.of(str, "a text")
        if len(found) > LONGEST_TEXT:
            raise self.refuse(f"a text of {len(found)} characters is too long")
        return found

    def type(self) -> str:
        """Types with shapes, as in ``float32[4096, 4096]``, divided by commas; or ``= name``."""
        found = self.text()
        if not found.startswith("= ") and found and not _TYPES.fullmatch(found):
            raise self.refuse(f"{found[:60]!r} is no type with a shape")
        return found

    def texts(self) -> list[str]:
        """A list of strings."""
        return [item.text() for item in self.items()]

    def integer(self, low: int, high: int = LARGEST_INTEGER) -> int:
        """A whole number between two others, ends included."""
        found = self.of(int, "a whole number")
        if not low <= found <= high:
            raise self.refuse(f"{_shown(found)} is not between {low} and {high}")
        return found

    def truth(self) -> bool:
        """True or false."""
        return self.of(bool, "true or false")

    def number(self, low: float | None = 0.0) -> float:
        """A finite number, from ``low`` on."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.refuse(f"a number is expected, not {_shown(self.value)}")
        try:
            found = float(self.value)
        except OverflowError as error:
            raise self.refuse("a number is too large") from error
        if not math.isfinite(found) or (low is not None and found < low):
            raise self.refuse(f"{_shown(self.value)} is not a number of at least {low}")
        return found

    def names(self) -> list[str]:
        """The names of a folded list; see :mod:`stepgraph.planning.folding`."""
        folded = {layers: item.texts() for layers, item in self.fields()}
        try:
            return unfold(folded, self._spend)
        except ValueError as error:
            raise self.refuse(str(error)) from error

    def patterns(self, layers: int) -> list[str]:
        """A list of patterns of names, each of which stands for one in every layer."""
        found = self.texts()
        self._spend(layers * len(found))
        if any(pattern.count("*") != 1 for pattern in found):
            raise self.refuse("a pattern does not say where the layer's number stands")
        return found

    def read(self, convert: Callable[[str], Any]) -> Any:
        """A text, converted; its ValueError is this place's."""
        try:
            return convert(self.text())
        except ValueError as error:
            raise self.refuse(str(error)) from error

    def _spend(self, count: int) -> None:
        self.names_left[0] -= count
        if self.names_left[0] < 0:
            raise self.refuse(f"more than {MOST_NAMES} names")

    def _inside(self, value: Any, name: str) -> Item:
        where = f"{self.where}.{name}" if self.where else name
        return Item(value, where[:200], self.names_left)


def check_plain(item: Item, depth: int = 6) -> Any:
    """Data of any form that holds finite, non-negative numbers and short texts; returned as it is."""
    value = item.value
    if depth == 0:
        raise item.refuse("nested too deeply")
    if isinstance(value, dict):
        for _, inner in item.fields():
            check_plain(inner, depth - 1)
    elif isinstance(value, list):
        for inner in item.items():
            check_plain(inner, depth - 1)
    elif isinstance(value, str):
        item.text()
    elif value is not None and not isinstance(value, bool):
        item.number()
    return value


def read_json(path: Path) -> Item:
    """The JSON of a file that is no larger than :data:`LARGEST_FILE` bytes.

    Raises:
        MalformedError: too large, not UTF-8, not JSON, nested too deeply, NaN or infinite numbers.
    """
    with path.open("rb") as stream:
        content = stream.read(LARGEST_FILE + 1)  # whatever the file's size was said to be
    if len(content) > LARGEST_FILE:
        raise MalformedError("the file", f"it is larger than {LARGEST_FILE // 2**20} MiB")
    try:
        return Item(json.loads(content.decode(), parse_constant=_no_constant))
    except RecursionError as error:
        raise MalformedError("the file", "it is nested too deeply") from error
    except ValueError as error:
        raise MalformedError("the file", f"it is not JSON: {error}") from error


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "a number of more than 63 bits"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    return text[:60] or type(value).__name__
