"""What code changes in Python, which dynamo knows and a captured graph leaves out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from stepgraph.torch_internals.sources import is_expression, readable

_OF_STATE = re.compile(r"\b_(buffers|parameters)\b")


@dataclass(frozen=True)
class Change:
    """What one run of the code does to Python state.

    Attributes:
        path: of the value, as the code would write it: ``model.calls``.
        holder: the object whose attribute ``name`` it is; the list or dict itself where that is empty.
        before: the value when it was captured.
        after: the value that the code leaves, where ``is_constant``.
        holds_tensors: the value that the code leaves has tensors in it that are not the module's own.
        holds_numbers: it has numbers in it that were read from tensors.
        is_object: it is none of all that: no constant, and without tensors, the module's own neither.
        was_read: the code looked at the value that it found.
    """

    path: str
    holder: Any
    name: str
    before: Any
    after: Any
    is_constant: bool
    holds_tensors: bool
    holds_numbers: bool
    is_object: bool
    was_read: bool


def changes_of(effects: Any) -> Iterator[Change]:
    """All that code has changed, as dynamo traced it: not what it made itself, nor state of the program."""
    graph = effects.output_graph_weakref()
    scope = {"L": graph.local_scope, "G": graph.global_scope}
    read = {guard.name for guard in graph.guards}
    for variable in effects._get_modified_vars():
        source = getattr(variable, "source", None)
        if source is None or not is_expression(source):
            continue  # made within the code
        kind = variable.mutation_type
        if not isinstance(kind, (AttributeMutationExisting, ValueMutationExisting)):
            continue
        try:
            holder = eval(source.name, scope)  # as dynamo's own guards look it up
        except Exception:
            holder = None
        for name, new in effects.store_attr_mutations.get(variable, {}).items():
            held = getattr(holder, "__dict__", {})
            if isinstance(holder, nn.Module) and (
                name in holder._buffers or name in holder._parameters
            ):
                continue  # state of the program, not of Python
            full = f"{source.name}.{name}"
            yield Change(readable(full), holder, name, held.get(name), *_value(new), full in read)
        state = isinstance(holder, nn.Module) or _OF_STATE.search(source.name)
        items = variable if isinstance(kind, ValueMutationExisting) else _changed_items(variable)
        if items is not None and not state:
            path = readable(source.name)
            yield Change(path, holder, "", holder, *_value(items), source.name in read)


def _changed_items(variable: VariableTracker) -> VariableTracker | None:
    """What an object is of its items, where code changed them: a dictionary with a class of its own."""
    names = ("_base_vt", "_dict_vt", "_list_vt")
    inner = next((it for it in (getattr(variable, name, None) for name in names) if it), None)
    changed = getattr(getattr(inner, "mutation_type", None), "is_modified", False)
    return inner if changed else None


def _value(variable: Any) -> tuple[Any, bool, bool, bool, bool]:
    """The value, and of what kind it is, in the order of :class:`Change`."""
    found: list[Any] = []
    VariableTracker.visit(found.append, variable)
    if any(isinstance(v, SymNodeVariable) for v in found):
        return None, False, False, True, False
    try:
        return variable.as_python_constant(), True, False, False, False
    except Exception:  # one of many classes, each with its own way to refuse
        tensors = [v for v in found if isinstance(v, TensorVariable)]
    made = (t.source is None or t.source.name.startswith("L['flat_args']") for t in tensors)
    return None, False, any(made), False, not tensors


def has_written_modules() -> bool:
    """Whether the code that dynamo traces now has written into modules: it does so behind the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    graph = effects.output_graph_weakref()
    scope = {"L": graph.local_scope, "G": graph.global_scope}
    for variable in effects._get_modified_vars():
        source = getattr(variable, "source", None)
        try:
            if source is not None and isinstance(eval(source.name, scope), nn.Module):
                return True
        except Exception:  # what is no expression was made by the code itself, or may be anything
            continue
    return False
