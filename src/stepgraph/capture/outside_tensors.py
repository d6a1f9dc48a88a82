"""Tensors that code reads from outside: class weights in a closure, a teacher, a plain attribute.

They are neither the model's parameters and buffers nor of the batch. Programs take them as inputs, whole on
every rank, under the names that the code has for them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepgraph.errors import name_a_few

_LIBRARIES = {"torch", "transformers", "builtins", "numpy", "stepgraph"}
_DEEP = 6  # how far from the callable, or from a module's attribute, a tensor may be


@dataclass(frozen=True)
class OutsideTensor:
    """A tensor, by where the code finds it: what is there from call to call is what a program takes."""

    name: str
    table: Any  # a mapping or list that has it under ``key``
    key: Any
    found: torch.Tensor

    @property
    def now(self) -> Any:
        """What is there now."""
        try:
            return self.table[self.key]
        except (LookupError, ValueError):  # a cell may be empty
            return None


class _Cell:
    """A closed-over variable, as a mapping of one."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value


def about_outside(tensors: Sequence[OutsideTensor]) -> list[str]:
    """What a report says of them."""
    if not tensors:
        return []
    names = name_a_few([one.name for one in tensors])
    return [f"read from outside model and batch, whole on every rank, and not learned: {names}"]


def outside_tensors(loss: Callable, model: nn.Module) -> list[OutsideTensor]:
    """Every tensor that the loss callable or the model may reach and that is not the model's own.

    From the callable: what it closes over, the globals that it names, its object and arguments bound to it,
    functions that it calls; from modules: attributes that are not registered. In lists, dicts, objects and
    modules, some steps deep.
    """
    found: list[OutsideTensor] = []
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen: set[int] = {id(model)}
    for name, table, key in [*_of_function(loss, seen), *_of_model(model, seen)]:
        tensor = table[key]
        if id(tensor) not in own:
            own.add(id(tensor))
            found.append(OutsideTensor(name, table, key, tensor))
    names: set[str] = set()
    for index, one in enumerate(found):
        if one.name in names:
            found[index] = OutsideTensor(f"{one.name}.{index}", one.table, one.key, one.found)
        names.add(found[index].name)
    return found


Place = tuple[str, Any, Any]


def _of_model(model: nn.Module, seen: set[int]) -> Iterator[Place]:
    for path, module in model.named_modules():
        seen.add(id(module))
        yield from _of_module(module, f"{path}." if path else "", seen, _DEEP, own=True)


def _of_module(
    module: nn.Module, prefix: str, seen: set[int], deep: int, own: bool = False
) -> Iterator[Place]:
    held = vars(module)
    for table in () if own else (module._parameters, module._buffers, module._modules):
        yield from _of_entries(table, prefix, seen, deep)
    plain = {name for name in held if not name.startswith("_") and name != "training"}
    yield from _of_entries(held, prefix, seen, deep, plain)


def _of_entries(
    table: MutableMapping, prefix: str, seen: set[int], deep: int, names: set[str] | None = None
) -> Iterator[Place]:
    for name, value in list(table.items()):
        if names is None or name in names:
            yield from _of_value(value, f"{prefix}{name}", table, name, seen, deep)


def _of_value(
    value: Any, name: str, table: Any, key: Any, seen: set[int], deep: int
) -> Iterator[Place]:
    if isinstance(value, torch.Tensor):
        yield name, table, key
        return
    if deep == 0 or id(value) in seen or isinstance(value, (type, str, bytes, int, float)):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from _of_module(value, f"{name}.", seen, deep - 1)
    elif isinstance(value, dict):
        yield from _of_entries(value, f"{name}.", seen, deep - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _of_value(item, f"{name}.{index}", value, index, seen, deep - 1)
    elif callable(value) and not hasattr(value, "__dict__"):
        return
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        yield from _of_function(value, seen, deep - 1)
    elif isinstance(getattr(value, "__dict__", None), dict) and not _is_librarys(value):
        yield from _of_entries(vars(value), f"{name}.", seen, deep - 1)


def _of_function(function: Any, seen: set[int], deep: int = _DEEP) -> Iterator[Place]:
    if isinstance(function, functools.partial):
        yield from _of_function(function.func, seen, deep)
        yield from _of_value(list(function.args), "argument", None, None, seen, deep)
        yield from _of_entries(function.keywords, "", seen, deep)
        return
    if isinstance(function, types.MethodType):
        yield from _of_value(function.__self__, "self", None, None, seen, deep)
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        yield from _of_value(function, type(function).__name__, None, None, seen, deep)
        return
    if _is_librarys(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield from _of_value(value, name, _Cell(cell), name, seen, deep)
    named = _names_in(function.__code__)
    for name in sorted(named & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield from _of_value(value, name, function.__globals__, name, seen, deep)
        elif not _is_librarys(value):
            yield from _of_entries(vars(value), f"{name}.", seen, deep, named)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_librarys(value: Any) -> bool:
    """Whether it is of a library's, where nobody keeps tensors of a loss's."""
    module = value.__name__ if isinstance(value, types.ModuleType) else None
    module = module or getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0] in _LIBRARIES
