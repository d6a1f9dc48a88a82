"""dynamo's capture of a whole module."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
from torch import fx, nn


def export_graph(
    module: nn.Module, args: tuple
) -> tuple[fx.GraphModule, dict[str, str], list[str]]:
    """Captures ``module(*args)`` whole with dynamo.

    Returns:
        the graph module; the flat parameter names mapped to the module's own; by dynamo's names, the
        modules whose code puts other buffers in place of theirs, which the graph does not do.

    Raises:
        GRAPH_BREAKS: if the Python code cannot be captured whole.
    """
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export

    settings: dict[str, Any] = {"allow_rnn": True}
    if hasattr(_dynamo_config, "side_effect_replay_policy"):
        settings["side_effect_replay_policy"] = "warn"  # the one way to hear of them
    with (
        _keeping_compiled_code(),
        _dynamo_config.patch(settings),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        captured = _dynamo_graph_capture_for_export(module)(*args)
    assigned = []
    for heard in caught:
        if "certain side effects happened" in str(heard.message):
            assigned += re.findall(r'"([^"]*)\._buffers"', str(heard.message))
        else:
            warnings.warn_explicit(heard.message, heard.category, heard.filename, heard.lineno)
    return captured, dict(captured.meta["dynamo_flat_name_to_original_fqn"]), assigned


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
