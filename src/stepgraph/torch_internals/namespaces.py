"""Global names of code that no module has: run from a file, loaded and not registered, or loaded twice.

dynamo looks for a name of a function that it inlines in the module of the same name, as it was when that
name was first met, imports one where there is none, and guards what is there.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, _import_module
from torch._dynamo.variables.builder import VariableBuilder

PREFIX = "___names_of_code"


class _Names:
    """The names of code, as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


@contextlib.contextmanager
def found_where_they_are() -> Iterator[None]:
    """Within it, names are read, guarded and written where the code has them."""
    found = InliningInstructionTranslator.get_globals_source_and_value
    known: dict[int, _Names] = {}

    def looked_up(translator: Any, name: str) -> tuple[Any, Any, Any]:
        names = translator.f_globals
        if _dynamo_finds(names):
            return found(translator, name)
        holder = known.setdefault(id(names), _Names(names))
        source = GlobalSource(translator.output.install_global_by_id(PREFIX, holder))
        return names, VariableBuilder(translator, source)(holder), AttrSource(source, name)

    InliningInstructionTranslator.get_globals_source_and_value = looked_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        InliningInstructionTranslator.get_globals_source_and_value = found  # type: ignore[method-assign]


def _dynamo_finds(names: dict[str, Any]) -> bool:
    """Whether code is of the module that has its name; torch's is, what it packs, and named tuples'."""
    module = names.get("__name__")
    if not isinstance(module, str):
        return False
    return (
        (module in sys.modules and getattr(_import_module(module), "__dict__", None) is names)
        or module.startswith(("torch.", "namedtuple_"))
        or "torch_package" in module
    )
