"""dynamo's capture of a whole module."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.functional_export as _functional_export
from torch import fx, nn
from torch._dynamo.output_graph import OutputGraph
from torch.distributions import Distribution, kl

from stepgraph.torch_internals import (
    assigned_buffers,
    flex,
    namespaces,
    numpy_values,
    python_values,
)
from stepgraph.torch_internals.code import generating_late
from stepgraph.torch_internals.sources import readable


class Exported(NamedTuple):
    """A module as dynamo captured it.

    ``names``: flat names of parameters -> the module's own. ``assigned``: the buffers that the code
    puts others in place of, which the graph does not do. ``heard``: what it read
    and changed in Python.
    """

    graph: fx.GraphModule
    names: dict[str, str]
    assigned: list[str]
    heard: python_values.Heard


def export_graph(module: nn.Module, args: tuple) -> Exported:
    """Captures ``module(*args)`` whole with dynamo.

    Raises:
        GRAPH_BREAKS: if the Python code cannot be captured whole.
    """
    settings: dict[str, Any] = {"allow_rnn": True, "capture_scalar_outputs": True}
    if hasattr(_dynamo_config, "trace_autograd_ops"):
        settings["trace_autograd_ops"] = True
    if hasattr(_dynamo_config, "side_effect_replay_policy"):
        settings["side_effect_replay_policy"] = "silent"  # they are heard, and written
    # What code in a checkpointed region changes is changed once: where it first runs.
    settings["skip_fwd_side_effects_in_bwd_under_checkpoint"] = True
    with (
        generating_late(),
        _keeping_compiled_code(),
        python_values.listening() as heard,
        flex.differentiable_on_host(),
        _gradients_within(),
        _unchecked_distributions(),
        assigned_buffers.written_in_place() as assigned,
        numpy_values.captured(),
        namespaces.found_where_they_are(),
        _dynamo_config.patch(settings),
    ):
        captured = _functional_export._dynamo_graph_capture_for_export(module)(*args)
    _name_insides_alike(captured)
    names = dict(captured.meta["dynamo_flat_name_to_original_fqn"])
    return Exported(captured, names, [*map(readable, assigned)], heard)


def _name_insides_alike(captured: fx.GraphModule) -> None:
    """Module paths inside the graph's own graphs (checkpointed regions) become what they are outside.

    torch's export takes its own root out of the paths of the outermost graph alone (2.13).
    """
    for part in captured.modules():
        if isinstance(part, fx.GraphModule) and part is not captured:
            _functional_export.clean_nn_module_stack_and_source_fn(part)


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
def _unchecked_distributions() -> Iterator[None]:
    """Arguments of distributions are not checked, as under ``torch.compile``, which leaves it at that.

    Checks are branches on data, of which every distribution would be a graph break. And what computes a
    divergence is looked up the first time in a way that dynamo cannot follow: it is known before.
    """
    for pair, divergence in kl._KL_REGISTRY.items():
        kl._KL_MEMOIZE.setdefault(pair, divergence)
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


@contextlib.contextmanager
def _gradients_within() -> Iterator[None]:
    """Allows ``torch.autograd.grad`` in what is captured, also where its own gradient is wanted.

    dynamo refuses results that depend on such gradients, because of what AOTAutograd does with a compiled
    function's results. What is captured here is traced once more as a whole, its backward included.
    """
    checks = (
        "_check_requires_grad_intermediate_outputs",
        "_validate_outputs_safe_for_autograd_nodes",
    )
    kept = {name: getattr(OutputGraph, name) for name in checks if hasattr(OutputGraph, name)}
    for name in kept:
        setattr(OutputGraph, name, lambda *args: None)
    try:
        yield
    finally:
        for name, check in kept.items():
            setattr(OutputGraph, name, check)


def example_value(node: fx.Node) -> Any:
    """What dynamo saw a call return, in a graph of its own."""
    return node.meta.get("example_value")


def differentiates_own_function(captured: fx.GraphModule) -> bool:
    """Whether a graph wants gradients of gradients, and has an ``autograd.Function`` of the user's in it.

    dynamo (2.13) keeps a function's backward without its gradient, so that they would be left out.
    """
    nodes = [
        node for m in captured.modules() if isinstance(m, fx.GraphModule) for node in m.graph.nodes
    ]
    twice = any(n.target is torch.autograd.grad and n.kwargs.get("create_graph") for n in nodes)
    return twice and any("autograd_function_apply" in str(n.target) for n in nodes)


def module_path(node: fx.Node) -> str:
    """The innermost module whose code makes a call, as the model's code names it."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return readable(str(modules[-1][0])).removeprefix("L['self'].") if modules else ""


def set_example_value(node: fx.Node, value: Any) -> None:
    """What a call returns that was added to a graph of dynamo's."""
    node.meta["example_value"] = value


def stack_trace(node: fx.Node) -> str | None:
    """Where the user's code makes a call, in a graph of dynamo's."""
    return node.meta.get("stack_trace")


def reads_number(node: fx.Node) -> bool:
    """Whether a call, in a graph of dynamo's, makes a number of a tensor's one element."""
    if node.op == "call_method":
        return node.target == "item"
    return node.target is torch.ops.aten.item.default or (
        getattr(node.target, "__name__", "") == "wrapped_item"  # of a NumPy array
    )


def is_assertion(node: fx.Node) -> bool:
    """Whether a call only checks a symbol, while the graph runs."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0] in _ASSERTIONS


_ASSERTIONS = {
    "_assert_scalar", "_assert_async", "_check", "_check_is_size", "_check_value",
    "sym_constrain_range", "sym_constrain_range_for_size",
}  # fmt: skip


def forget_symbols(node: fx.Node) -> None:
    """A node whose result was a symbol has another result now."""
    node.meta.pop("unbacked_bindings", None)
    node.meta.pop("example_value", None)
