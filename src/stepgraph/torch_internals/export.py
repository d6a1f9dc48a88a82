"""dynamo's capture of a whole module."""

import contextlib
import re
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.functional_export as _functional_export
from torch import fx, nn

from stepgraph.torch_internals import flex


class Exported(NamedTuple):
    """A module as dynamo captured it.

    ``names``: flat names of parameters -> the module's own. ``assigned``: by dynamo's names, the modules
    whose code puts other buffers in place of theirs, which the graph does not do. ``codes``: of the Python
    functions that were run through.
    """

    graph: fx.GraphModule
    names: dict[str, str]
    assigned: list[str]
    codes: list[types.CodeType]


def export_graph(module: nn.Module, args: tuple) -> Exported:
    """Captures ``module(*args)`` whole with dynamo.

    Raises:
        GRAPH_BREAKS: if the Python code cannot be captured whole.
    """
    settings: dict[str, Any] = {"allow_rnn": True}
    if hasattr(_dynamo_config, "side_effect_replay_policy"):
        settings["side_effect_replay_policy"] = "warn"  # the one way to hear of them
    with (
        _keeping_compiled_code(),
        _hearing_of_codes() as codes,
        _without_dynamic_shapes(),
        flex.differentiable_on_host(),
        _dynamo_config.patch(settings),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        captured = _functional_export._dynamo_graph_capture_for_export(module)(*args)
    assigned = []
    for heard in caught:
        if "certain side effects happened" in str(heard.message):
            assigned += re.findall(r'"([^"]*)\._buffers"', str(heard.message))
        else:
            warnings.warn_explicit(heard.message, heard.category, heard.filename, heard.lineno)
    return Exported(
        captured, dict(captured.meta["dynamo_flat_name_to_original_fqn"]), assigned, codes
    )


@contextlib.contextmanager
def _keeping_compiled_code() -> Iterator[None]:
    """Keeps what the process has compiled: torch's export begins with ``torch._dynamo.reset()``.

    The user's other models would recompile without a word. Capture uses no compiled code itself.
    """
    reset = torch._dynamo.reset
    torch._dynamo.reset = lambda: None
    try:
        yield
    finally:
        torch._dynamo.reset = reset


@contextlib.contextmanager
def _hearing_of_codes() -> Iterator[list[types.CodeType]]:
    """Fills a list with the functions that dynamo runs through; torch's export does not hand them on."""
    capture = _functional_export.fullgraph_capture
    heard: list[types.CodeType] = []

    def captured(*args: Any, **kwargs: Any) -> Any:
        found = capture(*args, **kwargs)
        heard.extend(dict.fromkeys(found.graph_capture_output.traced_code))
        return found

    _functional_export.fullgraph_capture = captured
    try:
        yield heard
    finally:
        _functional_export.fullgraph_capture = capture


@contextlib.contextmanager
def _without_dynamic_shapes() -> Iterator[None]:
    """Every size is static here: torch's export builds all guards, slowly, to see whether one is not."""
    check = _functional_export._suggest_or_raise_constraint_violation
    _functional_export._suggest_or_raise_constraint_violation = lambda *args: None
    try:
        yield
    finally:
        _functional_export._suggest_or_raise_constraint_violation = check


def example_value(node: fx.Node) -> Any:
    """What dynamo saw a call return, in a graph of its own."""
    return node.meta.get("example_value")


def stack_trace(node: fx.Node) -> str | None:
    """Where the user's code makes a call, in a graph of dynamo's."""
    return node.meta.get("stack_trace")
