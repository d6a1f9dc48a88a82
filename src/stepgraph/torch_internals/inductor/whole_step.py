"""Inductor's inner compiler, on a whole step."""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config as _inductor_config
from torch import fx

from stepgraph.torch_internals import fake_mode_of, host_device, new_fake_mode
from stepgraph.torch_internals.inductor.copies_kept import Hidden
from stepgraph.torch_internals.inductor.order import (
    one_collective_at_a_time,
    reading_before_writes,
    waiting_for_writes,
)
from stepgraph.torch_internals.storages import shared_arguments


def _compute_numbers_once(graph: fx.GraphModule) -> None:
    """Keeps 0-dim arithmetic out of the loops over tensors that read its result.

    Inductor computes such a number anew for each element (Adam's bias correction: two powers), which is
    free where arithmetic is, on accelerators, and half of an optimizer's time on the host.
    """
    from torch._inductor import test_operators  # noqa: F401  it defines the operator
    from torch._inductor.utils import is_gpu

    def is_number(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.ndim == 0 and not is_gpu(value.device.type)

    for node in list(graph.graph.nodes):
        computed = node.op == "call_function" and is_number(node) and node.all_input_nodes
        loops = [user for user in node.users if user.op == "call_function" and not is_number(user)]
        if computed and loops:
            with graph.graph.inserting_after(node):
                once = graph.graph.call_function(torch.ops._inductor_test.realize.default, (node,))
            once.meta = dict(node.meta)
            for user in loops:
                user.replace_input_with(node, once)
    graph.recompile()


def _read_what_is_used(graph: fx.GraphModule) -> None:
    """No result of several is read for nothing: a kernel may have fewer than its operator.

    Seen of ``flex_attention`` in torch 2.11, whose kernel for few queries has two of three.
    """
    for node in reversed(list(graph.graph.nodes)):
        if node.target is operator.getitem and not node.users:
            graph.graph.erase_node(node)


def _keep_strides(module: fx.GraphModule, graph: fx.GraphModule) -> None:
    """Results keep the strides that the module promises: another program was compiled for them.

    Inductor keeps those that it traced. A decomposition may have others (of ``cat`` with an empty tensor,
    which is how a cache of keys begins, a copy is left, laid out like its argument): that result is copied.
    """
    from torch._inductor.inductor_prims import force_stride_order

    results = module.graph.output_node().args[0]
    output = graph.graph.output_node()
    traced = list(output.args[0])  # type: ignore[arg-type]
    copies: dict[tuple, fx.Node] = {}
    for index, (result, node) in enumerate(zip(results, traced, strict=True)):  # type: ignore[arg-type]
        promised = result.meta["val"]  # type: ignore[union-attr]
        sizes = zip(promised.shape, promised.stride(), node.meta["val"].stride(), strict=True)  # type: ignore[union-attr]
        if all(size == 1 or wanted == found for size, wanted, found in sizes):
            continue
        key = (node, promised.stride())
        if key not in copies:
            with graph.graph.inserting_before(output):
                copies[key] = graph.graph.call_function(force_stride_order, key)
            copies[key].meta["val"] = promised
        traced[index] = copies[key]
    output.args = (tuple(traced),)
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in results]  # type: ignore[union-attr]
    output.meta["user_visible_output_idxs"] = list(range(len(traced)))
    graph.recompile()


def _laying_out_what_is_copied(module: fx.GraphModule, awaits: Collection) -> Callable[..., Any]:
    """The module, in which a copy reads the very memory that its wait keeps alive, laid out as promised.

    Inductor computes a value anew for each operator of others that it is given to: the memory that another
    stream reads would be free before the copy is through. And what arrives laid out otherwise would be
    copied again, by the host, whenever that is.
    """
    from torch._inductor.inductor_prims import force_stride_order

    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    sources = {node.args[1] for node in calls if node.target in awaits}
    if not sources:
        return module

    class LayingOut(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            computed = n in sources and n.op == "call_function"
            return force_stride_order(found, n.meta["val"].stride()) if computed else found

    return LayingOut(module).run


def _viewed(x: torch.Tensor, size: Sequence[int]) -> Any:
    """A view of a value that a decomposition laid out otherwise than the module promises may need a copy.

    That loses no write: a module writes into its inputs alone, which lie as promised.
    """
    if x.is_contiguous():
        return NotImplemented
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        try:
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).view(size)
            return NotImplemented
        except (ValueError, RuntimeError):
            pass
    return x.contiguous().view(size)


_VIEWS = {torch.ops.aten.view.default: _viewed, torch.ops.aten._unsafe_view.default: _viewed}


@contextlib.contextmanager
def _for_inductor(mode: Any) -> Iterator[None]:
    """A fake mode as inductor wants it.

    Constants of a graph that dynamo captured are real, and the mode would not mix them with fakes. Without
    an environment of shapes (it stays empty) nothing is cached.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    before = mode.allow_non_fake_inputs, mode.shape_env
    mode.allow_non_fake_inputs = True
    mode.shape_env = mode.shape_env or ShapeEnv()
    try:
        yield
    finally:
        mode.allow_non_fake_inputs, mode.shape_env = before


def _of_release() -> dict[str, Any]:
    """Settings without which a release is wrong.

    Before torch 2.13 a sum over rows that shares a kernel with one over columns loses the dimensions of
    one place that it should keep, and what reads it (another graph) refuses it.
    """
    known = hasattr(_inductor_config.triton, "mix_order_reduction")
    return {"triton.mix_order_reduction": False} if known and torch.__version__ < (2, 13) else {}


def digest_of_passes(decompositions: dict[Any, Callable]) -> bytes:
    """What tells code of ours that shapes a graph here, and these decompositions, from other versions."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    ours = (reading_before_writes, Hidden, shared_arguments, *decompositions.values())
    files = (__file__, *map(inspect.getfile, ours))
    return get_hash_for_files(tuple(dict.fromkeys(files)))


def _call_kernels_that_write(module: fx.GraphModule) -> None:
    """Operators that write in place, which inductor does not know and torch could decompose, are called.

    It would do so by itself, but refuses where the environment says ``CI``.
    """
    from torch._decomp import get_decompositions
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback

    for target in {node.target for node in module.graph.nodes}:
        writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        unknown = writes and target not in lowerings and target not in select_decomp_table()
        if unknown and get_decompositions([target]):
            make_fallback(target, warn=False)


_WHOLE = "whole"  # inductor's passes run on the graphs in a graph, too


def _first_pass(
    module: fx.GraphModule,
    examples: list[torch.Tensor],
    decompositions: dict[Any, Callable],
    awaits_copy: Collection,
) -> dict[str, Any]:
    """Decomposes the graph and simplifies it, as the first of inductor's passes; settings that do so.

    What was compiled before is found by the graph as it was given: then none of this is done.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    name = digest_of_passes(decompositions)
    hidden: list[Hidden] = []

    class Show(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for one in hidden:
                one.show(graph)

        def uuid(self) -> Any:
            return name

    class Prepare(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if _WHOLE not in graph.owning_module.meta:  # type: ignore[union-attr]  functions of an operator
                return
            table = {**select_decomp_table(), **_VIEWS, **decompositions}
            run = _laying_out_what_is_copied(module, awaits_copy)
            with fake_mode_of(examples) or contextlib.nullcontext():  # nothing is made on a device
                traced = make_fx(run, decomposition_table=table)(*examples)
            _keep_strides(module, traced)
            hidden.append(Hidden(traced.graph))
            joint_graph_passes(traced)
            hidden[-1].show_arithmetic()
            _read_what_is_used(traced)
            _compute_numbers_once(traced)
            _replace(graph, traced)

        def uuid(self) -> Any:
            return name

    return {"post_grad_custom_pre_pass": Prepare(), "post_grad_custom_post_pass": Show()}


def _replace(graph: fx.Graph, by: fx.GraphModule) -> None:
    """A graph becomes another one, of the same inputs; its module gets what the other reads."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    for name, value in (*by.named_children(), *by.named_buffers(), *by.named_parameters()):
        setattr(graph.owning_module, name, value)
    output = by.graph.output_node()
    copied: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(by.graph, copied))
    graph.output_node().meta.update(output.meta)
    graph.lint()


def compile_with_inductor(
    module: fx.GraphModule,
    examples: list[torch.Tensor],
    settings: dict[str, Any],
    collectives_overlap: bool,
    decompositions: dict[Any, Callable],
    awaits_copy: Collection = (),
) -> Callable[[list], Sequence[Any]]:
    """Compiles a whole-step graph (with its in-place writes) through inductor.

    The graph is decomposed and handed to inductor's inner compiler as it stands: AOTAutograd has
    differentiated and functionalised it already, and would only undo the in-place writes again.

    Args:
        module: a graph whose only mutations are its own writes into inputs.
        examples: fake inputs.
        settings: inductor config entries. Nothing is compiled lazily, so they need not outlive the call.
        collectives_overlap: False: no collective starts before the last one has been awaited.
        decompositions: of operators of our own, beside inductor's.
        awaits_copy: operators of ours that wait for a copy which another stream makes of their second
            argument.

    Returns:
        a callable that takes the list of inputs (and empties it) and returns the results.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    _call_kernels_that_write(module)
    if not collectives_overlap:
        settings = {**settings, "_pre_fusion_custom_pass": one_collective_at_a_time()}
    mode = fake_mode_of(examples) or new_fake_mode()
    with mode:  # a tensor that is given twice would be traced as one input
        examples = [
            torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=e.device)
            for e in examples
        ]
    prepare = _first_pass(module, examples, decompositions, awaits_copy)
    with (
        _for_inductor(mode),
        reading_before_writes(),
        waiting_for_writes(),
        torch.no_grad(),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        _inductor_config.patch({**_of_release(), **settings, **prepare}),
    ):
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        whole = fx.GraphModule(module, graph)
        whole.meta[_WHOLE] = True
        return _called_at_once(compile_fx_inner(whole, examples, is_inference=True), examples)


def _called_at_once(compiled: Any, examples: Sequence[torch.Tensor]) -> Callable:
    """On the host, what inductor's object calls: what is around that takes as long as several kernels.

    (A label for the profiler, counters; on a device, the end of autotuning, of which the host has none.)
    """
    inside, host = getattr(compiled, "current_callable", None), host_device().type
    if inside is None or any(example.device.type != host for example in examples):
        return compiled
    call = functools.partial(inside)
    call.owner = compiled  # type: ignore[attr-defined]  it takes parts of the code with it
    return call
