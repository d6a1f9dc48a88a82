"""Reading JSON that nobody vouches for, with msgspec: it is what a type says, or an error with a place.

msgspec decodes strictly: what a type does not name is refused, and no text becomes a number. It calls a key
of a table ``[...]``; here the key is found, because a plan has ten thousand of them.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta

Kind = TypeVar("Kind")

LARGEST_FILE = 64 * 2**20
WHOLE = "the file"  # where a problem has no place inside
LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = 1e300  # an infinite number is above it
_TYPE = r"\w{1,40}\[(\d{1,18}(, \d{1,18}){0,63})?\]"
_TYPES = rf"^(= .*|{_TYPE}(, {_TYPE})*|)\Z"

Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
AnyInteger = Annotated[int, Meta(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)]
Number = Annotated[float, Meta(ge=0, le=_LARGEST_NUMBER)]
AnyNumber = Annotated[float, Meta(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]
TypeText = Annotated[str, Meta(max_length=4096, pattern=_TYPES)]
"""Types with shapes, as in ``float32[4096, 4096]``, divided by commas; or ``= name`` of a tied tensor."""

DTYPES = {_name: getattr(torch, _name) for _name in ("bfloat16", "float16", "float32", "float64")}
_TYPE_EXPECTED = f"`str` matching regex {_TYPES!r}"
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_KINDS = re.compile(rf"`((?:{'|'.join(_WORDS)})(?: \| (?:{'|'.join(_WORDS)}))*)`")
_PLACE = re.compile(r" - at (`key` in )?`\$(.*)`\Z", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object in a file: what it does not name is an error."""


class MalformedError(Exception):
    """Data that is not what it should be; ``where`` is its path: ``request.mesh.0``."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(problem)
        self.where, self.problem = where[:200] or WHOLE, problem


@contextlib.contextmanager
def at(*steps: str) -> Iterator[None]:
    """A ValueError inside is what is wrong at this place."""
    try:
        yield
    except ValueError as error:
        raise MalformedError(".".join(steps), str(error)) from error


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """The content of a file that is no larger than so many bytes; :data:`LARGEST_FILE`, if not said.

    Raises:
        MalformedError: it is larger.
    """
    largest = LARGEST_FILE if largest is None else largest
    with path.open("rb") as stream:
        content = stream.read(largest + 1)  # whatever the file's size was said to be
    if len(content) > largest:
        shown = f"{largest // 2**20} MiB" if largest >= 2**20 else f"{largest} bytes"
        raise MalformedError("", f"it is larger than {shown}")
    return content


def parse_json(content: bytes) -> Any:
    """JSON as plain data.

    Raises:
        MalformedError: not UTF-8, not JSON, nested too deeply, NaN or infinite numbers.
    """
    try:
        return msgspec.json.decode(content)
    except RecursionError as error:
        raise MalformedError("", "it is nested too deeply") from error
    except (msgspec.DecodeError, ValueError) as error:
        place = _BYTE.search(str(error))
        near = ""
        if place is not None:
            around = content[max(0, int(place[1]) - 40) : int(place[1]) + 20]
            near = f", at {around.decode(errors='replace')!r}"
        raise MalformedError("", f"it is not JSON: {error}{near}") from error


def convert(data: Any, kind: type[Kind]) -> Kind:
    """Plain data as an object of a type, every field checked; a ``torch.dtype`` is read by its name.

    Raises:
        MalformedError: it is not of this type.
    """
    try:
        return msgspec.convert(data, kind, dec_hook=_floating_type)
    except RecursionError as error:
        raise MalformedError("", "it is nested too deeply") from error
    except msgspec.ValidationError as error:
        message = str(error)
    place = _PLACE.search(message)
    steps = _steps(data, kind, message, place[2] if place else "")
    problem = _PLACE.sub("", message)
    if place is not None and place[1]:
        problem += ", as a key"
    elif place is not None and problem.startswith("Expected") and " got " not in problem:
        problem += f", not {_shown(_inside(data, steps))}"
    problem = problem.replace(_TYPE_EXPECTED, "a type with a shape, such as float32[4, 8]")
    problem = _KINDS.sub(lambda m: " or ".join(_WORDS[k] for k in m[1].split(" | ")), problem)
    raise MalformedError(".".join(map(str, steps)), problem)


def _floating_type(kind: type, name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ValueError(f"{_shown(name)[:40]} is no floating-point type; known: {known}")
    return DTYPES[name]


def _steps(data: Any, kind: type, message: str, place: str) -> list[str | int]:
    """The keys that lead to where msgspec found something wrong."""
    found: list[str | int] = []
    for name, index in _STEP.findall(place):
        if index != "...":
            found.append(name or int(index))
            continue
        entries = list(_inside(data, found).items())
        while len(entries) > 1:  # the half that is refused in the same words holds the key
            half, rest = entries[: len(entries) // 2], entries[len(entries) // 2 :]
            entries = half if _refusal(_with(data, found, dict(half)), kind) == message else rest
        data = _with(data, found, dict(entries))
        found.append(entries[0][0])
    return found


def _refusal(data: Any, kind: type) -> str:
    try:
        msgspec.convert(data, kind, dec_hook=_floating_type)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _inside(data: Any, steps: list[str | int]) -> Any:
    for step in steps:
        data = data[step]
    return data


def _with(data: Any, steps: list[str | int], value: Any) -> Any:
    """The same data, another value in one place."""
    if not steps:
        return value
    changed = dict(data) if isinstance(data, dict) else list(data)
    changed[steps[0]] = _with(data[steps[0]], steps[1:], value)  # type: ignore[index]
    return changed


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "a number of more than 63 bits"
    if isinstance(value, (str, int, float, type(None))):
        return repr(value)[:60]
    return f"{len(value)} elements" if isinstance(value, (list, tuple, dict)) else "this"
