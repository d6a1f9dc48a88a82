"""Where dynamo found what code read, and what would have to be written to for it to find anything else."""

import functools
import re
import types
from collections.abc import Callable
from typing import Any

from stepgraph.torch_internals.writes import Writes


class Sources:
    """Where what was read is found: expressions, each from what another one finds."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        # An expression of _, the place of what that is, and the name that is asked for there.
        self._steps: list[tuple[str, int, str]] = []

    def add(self, source: Any) -> int:
        """One more, and all that lead to it; its place."""
        if (place := self._places.get(source.name)) is not None:
            return place
        base, expression = getattr(source, "base", None), source.name
        before = -1
        if base is not None:
            before = self.add(base)
            expression = expression.replace(base.name, "_")
        self._steps.append((expression, before, getattr(source, "member", "")))
        return self._places.setdefault(source.name, len(self._steps) - 1)

    def writes(self, scope: dict[str, Any]) -> Writes:
        """All that something would have to be written to, for any to be found otherwise."""
        found, values = Writes(), []
        for expression, before, member in self._steps:
            holder = values[before] if before >= 0 else None
            try:
                value = eval(code_of(expression), scope | {"_": holder})
            except Exception:  # a kind of source that is no expression
                found.unknown()
                break
            if isinstance(value, types.FunctionType):
                found.watch_function(value)
            elif not expression.startswith("dict("):  # a copy, of what a class has
                found.watch(value)
            if isinstance(holder, (types.FunctionType, types.MethodType)):
                attribute = re.match(r"_\.(\w+)", expression)
                found.watch_function(holder, attribute[1] if attribute else "")
            if isinstance(holder, types.ModuleType):
                found.watch_name(holder, member)
            values.append(value)
        return found


@functools.lru_cache(4000)
def code_of(expression: str) -> types.CodeType:
    """What evaluates an expression; it is evaluated again and again."""
    return compile(expression, "<source>", "eval")


def is_expression(source: Any) -> bool:
    """Whether what dynamo knows of where a value came from is an expression."""
    try:
        return bool(source.name)
    except NotImplementedError:
        return False


_STEPS: list[tuple[str, str | Callable]] = [
    (r"L\['self'\]\._modules\['_export_root'\]\.?", ""),
    (r"(?:\.__dict__\['_modules'\]|\._modules)\['(\w+)'\]", r".\1"),
    (r"\b_modules\['(\w+)'\]", r"\1"),
    (r"(?:\.__dict__\['_buffers'\]|\._buffers)\['(\w+)'\]", r".\1"),
    (r"G\['___names_of_code_\w+'\]\.", ""),
    (r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", ".")),
    (r"G\['(\w+)'\]", r"\1"),
]


def readable(text: str) -> str:
    """dynamo's name of a value, as the model's code would write it."""
    for pattern, instead in _STEPS:
        text = re.sub(pattern, instead, text)
    return text
