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
_DEEP = 16  # links from the callable, or from a module's attribute, that are followed


Link = tuple[Any, Any, Any]  # a mapping or list, a key in it, and what was found there


@dataclass(frozen=True)
class OutsideTensor:
    """A tensor, by where the code finds it: what is there from call to call is what a program takes.

    ``links``: how the code came there: what else must be as it was, or another tensor may be meant.
    """

    name: str
    table: Any  # a mapping or list that has it under ``key``
    key: Any
    found: torch.Tensor
    links: tuple[Link, ...] = ()
    requires_grad: bool = False

    @property
    def now(self) -> Any:
        """What is there now."""
        return _there(self.table, self.key)

    def broken(self) -> str:
        """What is no longer as it was on the way there, or nothing."""
        for table, key, found in self.links:
            if _there(table, key) is not found:
                return f"the {type(found).__name__} {key!r}, on the way to {self.name}"
        if getattr(self.now, "requires_grad", self.requires_grad) != self.requires_grad:
            return f"{self.name}.requires_grad == {self.requires_grad}"
        return ""


def _there(table: Any, key: Any) -> Any:
    try:
        return table[key]
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
    functions that it calls; from modules: attributes that are not registered, what their forward
    names. In lists, dicts, objects and modules, some steps deep.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    places: dict[int, list[tuple[str, Any, Any, tuple[Link, ...]]]] = {}
    seen: set[int] = {id(model)}
    for name, table, key, links in [*_of_function(loss, seen, ()), *_of_model(model, seen)]:
        if id(table[key]) not in own:
            places.setdefault(id(table[key]), []).append((name, table, key, links))
    found: list[OutsideTensor] = []
    names: set[str] = set()
    for index, several in enumerate(places.values()):
        name, table, key, links = several[0]
        if len(several) > 1:  # of one tensor in several places each must stay that
            links = tuple(
                link for _, t, k, before in several for link in (*before, (t, k, table[key]))
            )
        name = f"{name}.{index}" if name in names else name
        names.add(name)
        tensor = table[key]
        found.append(OutsideTensor(name, table, key, tensor, links, tensor.requires_grad))
    return found


Place = tuple[str, Any, Any, tuple[Link, ...]]


def _of_model(model: nn.Module, seen: set[int]) -> Iterator[Place]:
    for path, module in model.named_modules():
        seen.add(id(module))
        plain = {name for name in vars(module) if not name.startswith("_") and name != "training"}
        yield from _of_entries(vars(module), f"{path}." if path else "", seen, (), plain)
    for forward in dict.fromkeys(type(module).forward for module in model.modules()):
        yield from _of_function(forward, seen, ())


def _of_module(
    module: nn.Module, prefix: str, seen: set[int], links: tuple[Link, ...]
) -> Iterator[Place]:
    held = vars(module)
    links = (*links, (held, "training", module.training))
    for table in (module._parameters, module._buffers, module._modules):
        yield from _of_entries(table, prefix, seen, links)
    plain = {name for name in held if not name.startswith("_") and name != "training"}
    yield from _of_entries(held, prefix, seen, links, plain)


def _of_entries(
    table: MutableMapping,
    prefix: str,
    seen: set[int],
    links: tuple[Link, ...],
    names: set[str] | None = None,
) -> Iterator[Place]:
    for name, value in list(table.items()):
        if names is None or name in names:
            yield from _of_value(value, f"{prefix}{name}", table, name, seen, links)


def _of_value(
    value: Any, name: str, table: Any, key: Any, seen: set[int], links: tuple[Link, ...]
) -> Iterator[Place]:
    if isinstance(value, torch.Tensor):
        if table is not None and value.layout == torch.strided:
            yield name, table, key, links
        return
    if id(value) in seen or isinstance(value, (type, str, bytes, int, float)):
        return
    if len(links) > _DEEP:
        return
    seen.add(id(value))
    if table is not None:
        links = (*links, (table, key, value))
    if isinstance(value, nn.Module):
        yield from _of_module(value, f"{name}.", seen, links)
    elif isinstance(value, dict):
        yield from _of_entries(value, f"{name}.", seen, links)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _of_value(item, f"{name}.{index}", value, index, seen, links)
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        yield from _of_function(value, seen, links)
    elif isinstance(getattr(value, "__dict__", None), dict) and not _is_librarys(value):
        yield from _of_entries(vars(value), f"{name}.", seen, links)


def _of_function(function: Any, seen: set[int], links: tuple[Link, ...]) -> Iterator[Place]:
    if isinstance(function, functools.partial):
        yield from _of_function(function.func, seen, links)
        yield from _of_value(function.args, "argument", None, None, seen, links)
        yield from _of_entries(function.keywords, "", seen, links)
        return
    if isinstance(function, types.MethodType):
        yield from _of_value(function.__self__, "self", None, None, seen, links)
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        yield from _of_value(function, type(function).__name__, None, None, seen, links)
        return
    if _is_librarys(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield from _of_value(value, name, _Cell(cell), name, seen, links)
    named = _names_in(function.__code__)
    for name in sorted(named & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield from _of_value(value, name, function.__globals__, name, seen, links)
        elif not _is_librarys(value):
            yield from _of_entries(vars(value), f"{name}.", seen, links, named)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_librarys(value: Any) -> bool:
    """Whether it is of a library's, where nobody keeps tensors of a loss's."""
    module = value.__name__ if isinstance(value, types.ModuleType) else None
    module = module or getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0] in _LIBRARIES
