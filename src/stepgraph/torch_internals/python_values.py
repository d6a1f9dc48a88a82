"""What dynamo read from Python while it captured a module, and what the module's code changes there.

A captured graph holds neither: numbers that were read are constants in it, and assignments are left out.
dynamo knows both; torch's export throws them away.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo.functional_export as _functional_export
from torch import nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.tensor import TensorVariable

# Guards on what is no Python value of the model's: tensors (shards fail them), modes of torch (those that
# matter are part of what a program is kept for), hooks (looked at by themselves).
_NOT_READ = {
    "TENSOR_MATCH", "SHAPE_ENV", "DUPLICATE_INPUT", "GRAD_MODE", "GLOBAL_STATE", "TORCH_FUNCTION_STATE",
    "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "AUTOGRAD_SAVED_TENSORS_HOOKS", "FSDP_TRAINING_STATE",
    "EMPTY_NN_MODULE_HOOKS_DICT", "BUILTIN_MATCH", "MODULE_MATCH",
}  # fmt: skip
_NOT_THE_MODELS = re.compile(
    r"(G\['(__import_torch|pytree|ExportTracerOutput|__builtins|___unnamed)|__import__\('torch'\)"
    r"|L\['flat_args'\]|L\['self'\]\.in_spec|dict\(G\['ExportTracerOutput|list\(dict\.keys\(G\['__import_torch"
    r"|.*\.training$)"
)


@dataclass(frozen=True)
class Change:
    """What one run of the code does to Python state.

    Attributes:
        path: of the value, as the code would write it: ``model.calls``.
        holder: the object whose attribute ``name`` it is; the list or dict itself where that is empty.
        before: the value when it was captured.
        after: the value that the code leaves, where ``is_constant``.
        holds_tensors: the value that the code leaves has tensors in it that are not the module's own.
        was_read: the code looked at the value that it found.
    """

    path: str
    holder: Any
    name: str
    before: Any
    after: Any
    is_constant: bool
    holds_tensors: bool
    was_read: bool


@dataclass
class Heard:
    """What is heard of one capture by torch's export: see :func:`listening`."""

    codes: list[Any] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    function: Any = None
    output: Any = None

    def reads(self, settled: set[str]) -> "Reads":
        """The values that were read, to be compared from here on; while the capture's own still stand.

        Args:
            settled: paths that need no comparison.
        """
        captured = self.output.graph_capture_output
        guards = captured.output_graph.guards
        everything = guards.inner
        guards.inner = type(everything)(g for g in everything if self._is_read(g, settled))
        try:
            function, _ = _functional_export.get_traced_fn(self.function)
            checked = captured.build_guards(function.__code__).guard_manager
        finally:
            guards.inner = everything
        return Reads(self.function, checked)

    @staticmethod
    def _is_read(guard: Any, settled: set[str]) -> bool:
        name = guard.name
        return (
            guard.create_fn_name() not in _NOT_READ
            and not _NOT_THE_MODELS.match(name)
            and readable(name) not in settled
        )


class Reads:
    """Values that were read, against what they are now."""

    def __init__(self, function: nn.Module, checked: Any) -> None:
        self._scope = {"self": function, "flat_args": ()}
        self._checked = checked

    def hold(self) -> bool:
        """Whether all are what they were; takes microseconds."""
        return self._checked.check(self._scope)

    def broken(self) -> str:
        """The first that is not, as ``model.t == 1.0 (FILE:LINE)``."""
        parts = self._checked.check_verbose(self._scope).verbose_code_parts
        expression, _, line = (parts[0] if parts else "").partition("  # ")
        where = re.findall(r"(\S+:\d+) in ", line)
        return readable(expression.strip()) + (f" ({where[-1]})" if where else "")


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Within it, what torch's export learns and does not hand on is heard.

    Every size is static here: the guards that export builds to see whether one is not are not built.
    """
    heard = Heard()
    capture, check = (
        _functional_export.fullgraph_capture,
        _functional_export._suggest_or_raise_constraint_violation,
    )
    update = SideEffects.codegen_update_mutated

    def captured(function: Any, *args: Any, **kwargs: Any) -> Any:
        heard.function, heard.output = function, capture(function, *args, **kwargs)
        heard.codes = list(dict.fromkeys(heard.output.graph_capture_output.traced_code))
        return heard.output

    def updated(effects: Any, *args: Any, **kwargs: Any) -> Any:
        heard.changes = list(_changes_of(effects))  # the last time counts
        return update(effects, *args, **kwargs)

    _functional_export.fullgraph_capture = captured
    _functional_export._suggest_or_raise_constraint_violation = lambda *args: None
    SideEffects.codegen_update_mutated = updated
    try:
        yield heard
    finally:
        _functional_export.fullgraph_capture = capture
        _functional_export._suggest_or_raise_constraint_violation = check
        SideEffects.codegen_update_mutated = update


def _changes_of(effects: Any) -> Iterator[Change]:
    graph = effects.output_graph_weakref()
    scope = {"L": graph.local_scope, "G": graph.global_scope}
    read = {guard.name for guard in graph.guards}
    for variable in effects._get_modified_vars():
        source = getattr(variable, "source", None)
        if source is None:
            continue
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
        if isinstance(kind, ValueMutationExisting) and not isinstance(holder, nn.Module):
            path = readable(source.name)
            if "._buffers" not in path and "._parameters" not in path:
                yield Change(path, holder, "", holder, *_value(variable), source.name in read)


def _value(variable: Any) -> tuple[Any, bool, bool]:
    """The value, whether it is a constant, and whether tensors that are not the module's are in it."""
    try:
        return variable.as_python_constant(), True, False
    except Exception:  # one of many classes, each with its own way to refuse
        return None, False, _has_tensors(variable)


def _has_tensors(variable: Any) -> bool:
    found: list[Any] = []
    VariableTracker.visit(found.append, variable)
    tensors = [v for v in found if isinstance(v, TensorVariable)]
    return any(t.source is None or t.source.name.startswith("L['flat_args']") for t in tensors)


_STEPS: list[tuple[str, str | Callable]] = [
    (r"L\['self'\]\._modules\['_export_root'\]\.?", ""),
    (r"(?:\.__dict__\['_modules'\]|\._modules)\['(\w+)'\]", r".\1"),
    (r"\b_modules\['(\w+)'\]", r"\1"),
    (r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", ".")),
    (r"G\['(\w+)'\]", r"\1"),
]


def readable(text: str) -> str:
    """dynamo's name of a value, as the model's code would write it."""
    for pattern, instead in _STEPS:
        text = re.sub(pattern, instead, text)
    return text
