"""dynamo and AOTAutograd, as a backend of ``torch.compile`` meets them."""

import contextlib
import functools
import gc
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from stepgraph.torch_internals import host_device
from stepgraph.torch_internals.limits import CRASHES_ON_DEVICES, LIMITS
from stepgraph.torch_internals.uneven import copy_uneven_shards

BACKWARD = "backward"


def input_sources(graph: fx.GraphModule) -> list[str]:
    """How dynamo names the inputs of a graph that it captured: ``L['self']._parameters['weight']``."""
    found = []
    for node in graph.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        found.append(str(name() if callable(name) else name))
    return found


_VIEWS = {
    "view", "t", "transpose", "permute", "data", "detach", "narrow", "select", "getitem", "reshape",
    "flatten", "squeeze", "unsqueeze", "expand", "T", "mT", "getattr", "chunk", "split",
}  # fmt: skip


def write_into(graph: fx.GraphModule, source: Any) -> str | None:
    """Where a captured graph, not functional yet, writes into what ``source`` returns, or a view of it."""
    made = getattr(source, "overloadpacket", source)
    watched: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        first = node.args[0] if node.args else None
        if node.target in (source, made):
            watched.add(node)
        elif (
            node.kwargs.get("out") in watched
            or (first in watched and _writes(name))
            or (_renormalises(node, name) and watched.intersection(node.all_input_nodes))
        ):
            lines = (node.meta.get("stack_trace") or str(node)).strip().splitlines()
            return [line.strip() for line in lines if line.strip(" ^~")][-1]
        elif first in watched and name in _VIEWS:
            watched.add(node)
    return None


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("setitem", "iadd", "isub", "imul", "itruediv", "copy_")


def _renormalises(node: fx.Node, name: str) -> bool:
    """An embedding with ``max_norm`` writes into its table before it reads."""
    if name not in ("embedding", "embedding_bag"):
        return False
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    return given is not None


def has_symbols(graph: fx.GraphModule) -> bool:
    """Whether a size somewhere in a graph is a symbol."""

    def symbolic(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return not all(isinstance(size, int) for size in value.shape)
        if isinstance(value, (tuple, list)):
            return any(map(symbolic, value))
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))

    metas = (node.meta for node in graph.graph.nodes)
    return any(symbolic(meta.get("val", meta.get("example_value"))) for meta in metas)


def differentiate_and_compile(
    graph: fx.GraphModule,
    examples: Sequence[Any],
    partition: Callable,
    compile_side: Callable,
    compile_alone: Callable,
    decompositions: dict[Any, Callable],
) -> Callable:
    """AOTAutograd on one graph.

    Args:
        partition: parts a joint graph in two; as AOTAutograd calls it.
        compile_side: makes a forward or a backward executable.
        compile_alone: makes a graph without a backward executable.
    """

    def really(function: Callable) -> Callable:
        """AOTAutograd calls under its fake mode, which would make fakes of all that is made inside."""

        def call(*args: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **options)

        return call

    def keeping(side: fx.GraphModule, inputs: Any) -> Callable:
        """A backward that overwrites what the forward saved could not run twice (``retain_graph``)."""
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata and context.fw_metadata.bw_donated_idxs:
            context.fw_metadata.bw_donated_idxs.clear()
        return compile_side(side, inputs)

    compiler = aot_autograd(
        fw_compiler=really(keeping),
        bw_compiler=really(keeping),
        inference_compiler=really(compile_alone),
        partition_fn=really(partition),
        decompositions=decompositions,
    )
    return compiler(graph, examples)


def forget_modules(graph: fx.GraphModule) -> None:
    """Drops what a graph that dynamo keeps knows of modules: their classes would live as long."""
    known = getattr(graph.graph._graph_namespace, "_obj_to_name", {})
    erased = [node for node in known if isinstance(node, fx.Node)]  # it remembers those as well
    for node in [*graph.graph.nodes, *erased]:
        for key in ("nn_module_stack", "source_fn_stack", "fwd_nn_module_stack"):
            node.meta.pop(key, None)


def compile_with_symbols(graph: fx.GraphModule, examples: Sequence[Any], lowering: str) -> Callable:
    """torch's own way for a graph whose sizes are symbols."""
    if lowering != "eager":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, list(examples))

    def as_it_is(side: fx.GraphModule, inputs: Any) -> Callable:
        return make_boxed_func(side.forward)

    return aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is)(graph, examples)


def part_joint_graph(joint: fx.GraphModule, inputs: Any, results: int, options: dict) -> tuple:
    """torch's partitioner that keeps every forward value which the backward reads."""
    return default_partition(joint, inputs, num_fwd_outputs=results, **options)


def tag_sides(graph: fx.GraphModule) -> None:
    """Tells torch's partitioner which operations are forward and which backward.

    It takes everything up to the last forward one for forward: views that AOTAutograd makes anew for
    results stand behind the backward, and are left without a tag.
    """
    behind = False
    for node in graph.graph.nodes:
        if "phase" in node.meta:
            behind = behind or node.meta["phase"] == BACKWARD
            if node.meta["phase"] == BACKWARD:
                node.meta["partitioner_tag"] = "is_backward"
            elif not behind:
                node.meta["partitioner_tag"] = "is_forward"


def compile_apart(function: Callable, backend: Callable, limit: int, fullgraph: bool) -> Callable:
    """``torch.compile`` for fixed shapes; what is compiled is not shared with other calls of it.

    Args:
        limit: how often each piece of code may be compiled.
    """
    options: dict[str, Any] = {"backend": backend, "dynamic": False, "fullgraph": fullgraph}
    known = inspect.signature(torch.compile).parameters
    if "isolate_recompiles" in known:
        options |= {"isolate_recompiles": True, "recompile_limit": limit}
    compiled = torch.compile(function, **options)
    backend.region = getattr(compiled, "_isolate_recompiles_id", -1)  # type: ignore[attr-defined]
    return compiled if "isolate_recompiles" in known else LIMITS.raised_by(limit, compiled)


@contextlib.contextmanager
def running_regions_once() -> Iterator[None]:
    """What is captured in it of code under ``torch.utils.checkpoint`` may change things, once.

    It would break the graph otherwise, and change them again when the region is recomputed.
    """
    with _dynamo_config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


# How dynamo begins to say why it ends a graph: a size is decided by data, or code reads a number.
BY_SIZES = ("Dynamic shape operator",)
BY_NUMBERS = (
    *BY_SIZES, "Unsupported Tensor.item()", "Tensor.tolist()", "Data dependent operator",
)  # fmt: skip


def graphs_ended(reasons: tuple[str, ...]) -> int:
    """How many graphs dynamo has ended in this process for some reasons (:data:`BY_SIZES`)."""
    met = torch._dynamo.utils.counters["graph_break"].items()
    return sum(times for reason, times in met if reason.startswith(reasons))


def leaves_behind(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors to whose ``.grad`` a backward from some values adds."""
    found, stack = [], [value.grad_fn for value in values if value.grad_fn is not None]
    seen = set(stack)
    while stack:
        function = stack.pop()
        if isinstance(leaf := getattr(function, "variable", None), torch.Tensor):
            found.append(leaf)
        for behind, _ in function.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                stack.append(behind)
    return found


def code_now() -> types.CodeType | None:
    """While a backend runs: the code that dynamo is compiling."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator.current_tx(), "f_code", None)


def fake_mode_now() -> FakeTensorMode | None:
    """While a backend runs: the mode in which dynamo captured the graph."""
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def drop_compiled(
    codes: set[types.CodeType], backends: Sequence[object], modes: set[weakref.ref]
) -> None:
    """Takes what some backends compiled out of dynamo's caches, which would keep it as long as the code.

    Args:
        codes, modes: what was captured for them, and the fake modes that it was captured in.
    """
    from torch._dynamo import bytecode_transformation, eval_frame, guards
    from torch._dynamo.utils import CleanupManager

    gone = guards.DeletedGuardManagerWrapper("the model that it was compiled for is gone")
    dropped = []
    for code in codes:
        entries = list(eval_frame._debug_get_cache_entry_list(code))
        if by_region := getattr(eval_frame, "_get_cache_entries_for_region", None):
            regions = {getattr(backend, "region", -1) for backend in backends}
            entries += [entry for region in regions for entry in by_region(code, region)]
        for entry in entries:
            manager = entry.guard_manager
            state = getattr(manager, "extra_state", None)
            made_by = getattr(entry.backend, "compiler_fn", entry.backend)
            if state is not None and any(made_by is backend for backend in backends):
                made = entry.code
                state.invalidate(entry, gone)
                manager.__init__()  # without its guards, whoever still holds it
                dropped.append(manager)
                if made in CleanupManager.instance:  # its globals: the compiled functions
                    CleanupManager.instance._remove_id(id(made))

    # Classes and functions that were compared by identity hold what made the guards for their own lifetime.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        watched = finalizer.peek()
        call = watched[1].func if watched and type(watched[1]) is functools.partial else None
        maker = call.__self__ if isinstance(call, types.MethodType) else None
        if isinstance(maker, guards.CheckFunctionManager):
            made = getattr(maker, "guard_manager", None)
            if any(made is manager for manager in dropped):
                finalizer.detach()
    if kept := getattr(bytecode_transformation, "_cached_cleaned_instructions", None):
        kept.cache_clear()
    # A fake of a graph's input that has a history holds itself, through autograd's own references, which
    # no collector sees: its mode, the mode's shapes, and what these remember of inputs.
    for mode in (reference() for reference in modes):
        if mode is not None and mode.shape_env is not None:
            mode.shape_env.tracked_fakes = None


def only_inlined(function: types.FunctionType) -> None:
    """dynamo captures a function of ours as part of what calls it, and never by itself."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def inner_error(error: BaseException) -> BaseException:
    """What went wrong inside a backend that dynamo called."""
    return getattr(error, "inner_exception", None) or error


def recompilation_reason() -> str | None:
    """While a backend runs: which guard failed, if dynamo compiles this piece of code once more."""
    from torch._dynamo.utils import get_metrics_context

    metrics = getattr(get_metrics_context(), "_metrics", {})
    reason = metrics.get("recompile_reason")
    return str(reason) if reason else None


def compiled_autograd_problem(device: str | None = None) -> str | None:
    """Why this torch's compiled autograd cannot be used (with values on a device); None: it can."""
    try:
        from torch._dynamo import compiled_autograd
    except ImportError as error:
        return f"torch {torch.__version__} has none: {error}"
    known = hasattr(compiled_autograd, "_enable")
    if not known or not hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph"):
        return f"torch {torch.__version__} has it in another form"
    if CRASHES_ON_DEVICES and device not in (None, host_device().type):
        return f"torch {torch.__version__} crashes after it where values are on a device"
    return None


def backward_now() -> int | None:
    """The number of the backward that autograd is running now, if it is."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def is_for_chosen_inputs(leaves: Sequence[torch.Tensor]) -> bool:
    """Within a backward that reaches leaves: whether its caller wants gradients of some of them alone."""
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    try:
        return not all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch's answer where they are not added to ``.grad``: autograd.grad
        return True


def after_backward(function: Callable[[], None]) -> None:
    """Within a backward: calls a function when it is done, as part of it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def keeps_graph() -> bool:
    """Within a backward: whether its caller retains the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def compiled_autograd(compiler: Callable) -> Iterator[None]:
    """Within it a backward is captured as one graph, which ``compiler`` makes executable.

    torch (2.11 to 2.14) clones what a hook is given by its storage, which DTensors refuse; of the error,
    raised under C++, it sometimes takes no notice. They are cloned as what they are meanwhile.
    """
    from torch._dynamo import compiled_autograd

    by_storage = compiled_autograd.maybe_clone
    copy_uneven_shards()

    def clone(x: torch.Tensor | None) -> torch.Tensor | None:
        return x.detach().clone() if isinstance(x, DTensor) else by_storage(x)

    compiled_autograd.maybe_clone = clone
    try:
        with compiled_autograd._enable(compiler, dynamic=False):
            yield
    finally:
        compiled_autograd.maybe_clone = by_storage


def forget_backwards(compiler: Callable) -> bool:
    """Empties compiled autograd's cache, which is one for the process and keeps all that it captured.

    Args:
        compiler: what captures of ours were given, as a partial of it. Of these torch (2.13) leaks a tuple
            that holds all of a capture, which is emptied as well.

    Returns:
        whether it did; not while somebody, maybe on another thread, captures a backward or runs one.
    """
    from torch._dynamo import compiled_autograd

    in_use = ("depth", "in_compiled_autograd_region")
    if any(getattr(compiled_autograd, name, True) for name in in_use):
        return False
    torch._C._dynamo.compiled_autograd.clear_cache()
    for held in gc.get_objects():
        if type(held) is compiled_autograd.AutogradCompilerInstance:
            made_by = getattr(getattr(held, "compiler_fn", None), "func", None)
            if made_by is compiler:
                for node in held.fx_tracer.graph.nodes:
                    node.meta.clear()
                vars(held).clear()
    return True
