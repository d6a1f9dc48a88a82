"""What dynamo read from Python while it captured a module; a captured graph has numbers of it as constants.

dynamo knows what it read, and what the module's code changes; torch's export throws both away.
"""

import contextlib
import dis
import itertools
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo.config as _dynamo_config
import torch._dynamo.functional_export as _functional_export
from torch import nn
from torch._dynamo.side_effects import SideEffects

from stepgraph.torch_internals.limits import SAFE_GUARDS
from stepgraph.torch_internals.python_changes import Change, changes_of
from stepgraph.torch_internals.sources import Sources, readable
from stepgraph.torch_internals.unguarded import Unguarded
from stepgraph.torch_internals.words import Snapshot
from stepgraph.torch_internals.writes import Writes

# Guards on what is no Python value of the model's: tensors (shards fail them), modes of torch (those that
# matter are part of what a program is kept for), hooks (looked at by themselves).
_NOT_READ = {
    "TENSOR_MATCH", "SHAPE_ENV", "DUPLICATE_INPUT", "GRAD_MODE", "GLOBAL_STATE", "TORCH_FUNCTION_STATE",
    "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "AUTOGRAD_SAVED_TENSORS_HOOKS", "FSDP_TRAINING_STATE",
    "EMPTY_NN_MODULE_HOOKS_DICT",
}  # fmt: skip
_NOT_THE_MODELS = re.compile(
    r"(G\['(__import_torch(_dot_|')|pytree|ExportTracerOutput|__builtins|___unnamed)|__import__\('torch'\)"
    r"|L\['flat_args'\]|L\['self'\]\.in_spec|L\['self'\]\._modules\['_export_root'\]\.tree|dict\(G\['ExportTracerOutput|list\(dict\.keys\(G\['__import_torch(_dot_|')"
    r"|L\['self'\].*\['model'\].*\.training$)"
)
# Where it is slow to look anything up, these count.
_CONSTANTS = {
    "CONSTANT_MATCH",
    "EQUALS_MATCH",
    "SEQUENCE_LENGTH",
    "DICT_KEYS_MATCH",
    "CLOSURE_MATCH",
}


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
        outside = captured.output_graph
        scope = {"L": outside.local_scope, "G": outside.global_scope}
        everything = outside.guards.inner
        kept, slow = [], {}
        sources, unguarded = Sources(), Unguarded(self.codes)
        for guard in everything:
            if not _NOT_THE_MODELS.match(guard.name) and readable(guard.name) not in settled:
                unguarded.add(guard, scope)
            if not self._is_read(guard, settled):
                continue
            holder = _slow_holder(guard, scope)
            name = getattr(guard.originating_source, "member", None)
            if holder is not None and name in vars(holder):
                slow[id(holder), name] = (vars(holder), name, readable(guard.name))
            elif holder is None or guard.create_fn_name() in _CONSTANTS:
                kept.append(guard)
            else:
                continue
            sources.add(guard.originating_source)
        # An attribute that was tried to read, and made when it was not there.
        for change in self.changes:
            held = getattr(change.holder, "__dict__", {})
            if change.name and change.name not in held and self._is_loaded(change.name):
                slow[id(change.holder), change.name] = (held, change.name, change.path)
        outside.guards.inner = type(everything)(kept)
        try:
            function, _ = _functional_export.get_traced_fn(self.function)
            with _dynamo_config.patch(**SAFE_GUARDS):
                checked = captured.build_guards(function.__code__).guard_manager
        finally:
            outside.guards.inner = everything
        return Reads(self.function, checked, list(slow.values()), unguarded, sources, scope["G"])

    def _is_loaded(self, name: str) -> bool:
        codes = (code for code in self.codes if name in code.co_names)
        steps = itertools.chain.from_iterable(map(dis.get_instructions, codes))
        return any(one.argval == name and one.opname.startswith("LOAD") for one in steps)

    @staticmethod
    def _is_read(guard: Any, settled: set[str]) -> bool:
        name, kind = guard.name, guard.create_fn_name()
        return kind not in _NOT_READ and not (
            _NOT_THE_MODELS.match(name) or readable(name) in settled
        )


def _slow_holder(guard: Any, scope: dict[str, Any]) -> Any:
    """The object that is looked into, where its class looks attributes up in Python (configurations do)."""
    source = guard.originating_source
    if guard.create_fn_name() == "TYPE_MATCH":
        source = getattr(source, "base", None)
    while source is not None:
        try:
            holder = eval(source.name, scope)
        except Exception:  # a kind of source that is no expression
            return None
        if type(type(holder).__getattribute__) is types.FunctionType:
            return holder
        source = getattr(source, "base", None)
    return None


class Reads:
    """Values that were read, against what they are now.

    Where nothing was written to since before they were last compared, they are not compared again. What
    would have to be written to is found when they are compared for the first time, and again when they were
    written to and no longer are: at once, and later after as many steps as make it worth it.
    """

    _LONGEST = 64  # steps

    def __init__(
        self,
        function: nn.Module,
        checked: Any,
        slow: list[tuple[dict, str, str]],
        unguarded: Unguarded,
        sources: Sources,
        names: dict[str, Any],
    ) -> None:
        self._scope = {"self": function, "flat_args": ()}
        self._checked = checked
        self._slow = [(values, name, values.get(name), shown) for values, name, shown in slow]
        self._unguarded, self._sources, self._names = unguarded, sources, names
        self._writes = Writes()
        # Calls since a write, how many that must be, and comparisons since all was followed anew.
        self._quiet = self._wait = self._followed = 0

    def untouched(self) -> bool:
        """Whether nothing was written to since before they were compared; False where that is not known."""
        if self._writes.none():
            self._quiet += 1
        else:
            self._quiet = self._followed = 0
        return self._followed > 1

    @property
    def _all(self) -> dict[str, Any]:
        return {"L": self._scope, "G": self._names}

    def snapshot(self) -> Snapshot | None:
        """What would have to be written to; None: they have to be compared."""
        return self._writes.snapshot() if self._followed > 1 else None

    def remember(self) -> None:
        """They were just found to be what they were, and all is as it is between calls."""
        if self._followed < 2:  # else it was remembered before they were compared
            self._writes.remember()

    def hold(self) -> bool:
        """Whether all are what they were."""
        for values, name, value, _ in self._slow:
            if values.get(name) is not value and values.get(name) != value:
                return False
        if not self._checked.check(self._scope) or self._unguarded.broken(self._all):
            return False
        self._watch()
        return True

    def _watch(self) -> None:
        if self._followed:
            self._followed += 1
        elif self._quiet >= self._wait:
            self._writes = self._sources.writes(self._all)
            self._unguarded.watch(self._writes, self._all)
            for values, *_ in self._slow:
                self._writes.watch_table(values)
            self._followed, self._wait = 1, min(self._LONGEST, 2 * self._wait or 1)

    def broken(self) -> str:
        """The first that is not, as ``model.t == 1.0 (FILE:LINE)``."""
        for values, name, value, shown in self._slow:
            if values.get(name) != value:
                return f"{shown} == {value!r}"
        found = self._checked.check_verbose(self._scope)
        if found.result:
            return readable(self._unguarded.broken(self._all))
        parts = found.verbose_code_parts
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
        heard.changes = list(changes_of(effects))  # the last time counts
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


def numbers_given() -> tuple[bool, set[float]]:
    """While a backend runs: the numbers that dynamo found where code may have put them.

    Returns:
        whether there are some that were handed over, as local values; and those in attributes and globals,
        and lengths of lists.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph = InstructionTranslator.current_tx().output
    scope = {"L": graph.local_scope, "G": graph.global_scope}
    handed, read = False, set()
    for guard in graph.guards:
        kind, name = guard.create_fn_name(), guard.name
        if kind not in ("CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH"):
            continue
        try:
            value = eval(name, scope)
            value = len(value) if kind == "SEQUENCE_LENGTH" else value
        except Exception:  # a kind of source that is no expression
            continue
        if type(value) not in (int, float):
            continue
        if kind == "SEQUENCE_LENGTH" or _is_kept(guard.originating_source, scope):
            read.add(float(value))
        elif value not in (0, 1):
            handed = True
    return handed, read


def _is_kept(source: Any, scope: dict[str, Any]) -> bool:
    """Whether a value is a global or in an attribute of a module."""
    while (base := getattr(source, "base", None)) is not None:
        try:
            if isinstance(eval(base.name, scope), nn.Module):
                return True
        except Exception:
            return False
        source = base
    return source.name.startswith("G[")
