"""NumPy's values that a module's code reads: numbers are constants, arrays no inputs of a program.

dynamo makes graph inputs of both, which torch's export does not follow to where the code has them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._guards import TracingContext

from stepgraph.errors import CaptureError
from stepgraph.torch_internals.sources import readable

_TORCHS = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Within it torch's export captures NumPy's numbers as Python's, compared as those are.

    Raises:
        CaptureError: the code reads an array.
    """
    wrap = VariableBuilder._wrap
    met: list[tuple[str, str | None]] = []

    def wrapped(builder: VariableBuilder, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            met.append((readable(builder.name), _line_now()))
        if not isinstance(value, np.number):
            return wrap(builder, value)
        source = builder.get_source()
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
        return ConstantVariable.create(value.item(), source=source)

    VariableBuilder._wrap = wrapped  # type: ignore[method-assign]
    try:
        yield
    except Exception as error:
        _refuse(met, error)
        raise
    finally:
        VariableBuilder._wrap = wrap  # type: ignore[method-assign]
    _refuse(met, None)


def _line_now() -> str | None:
    """The innermost line of the user's code that dynamo is at."""
    for frame in reversed(TracingContext.extract_stack()):
        if not frame.filename.startswith((_TORCHS, "<")):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return None


def _refuse(met: list[tuple[str, str | None]], error: Exception | None) -> None:
    for name, where in met:
        raise CaptureError(
            f"the code reads the NumPy array {name}",
            where=where,
            why="programs take tensors; of an array nobody would see that it changed",
            do="keep a tensor in its place: torch.from_numpy(array), called once and outside what is "
            "captured, is an input of the program, and has the array's own memory",
        ) from error
