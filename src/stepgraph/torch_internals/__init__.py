"""The only package that names a private torch API: the one place to port.

Tried on torch 2.13.0; written to import on 2.11. Where a private name moved or is missing, the
function here says so; nothing else in stepgraph has to change.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree  # noqa: F401  (the one door to it)
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.exc import TorchDynamoException, Unsupported, UserError
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401  (the one door to it)

from stepgraph.torch_internals.code import generating_late
from stepgraph.torch_internals.sharding import SIZE_ADJUSTERS

collective_ops = torch.ops._c10d_functional
mutable_copy = torch.ops.aten.copy_.default

ALL_GATHER = collective_ops.all_gather_into_tensor.default
ALL_GATHER_INTO = collective_ops.all_gather_into_tensor_out.default
REDUCE_SCATTER = collective_ops.reduce_scatter_tensor.default
ALL_REDUCE, ALL_REDUCE_INTO = collective_ops.all_reduce.default, collective_ops.all_reduce_.default
ALL_TO_ALL = collective_ops.all_to_all_single.default
WAIT = collective_ops.wait_tensor.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

# Python that cannot be captured, and values that Python wants to read while it is.
GRAPH_BREAKS = (
    Unsupported,
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UserError,  # a number that depends on data, where Python needs to know it
)
SIZE_BY_DATA = DynamicOutputShapeException
DynamoError = TorchDynamoException


# ---------------------------------------------------------------------------------- fake tensors


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes but no data; real tensors may be mixed in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def host_device() -> torch.device:
    """The device that torch computes on without any accelerator, whatever the default device is now."""
    return torch.Generator().device


def is_there(device_type: str) -> bool:
    """Whether this process can compute on a kind of device, not only whether torch was built for it."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return device_type == host_device().type or (here is not None and here.type == device_type)


def fake_mode_of(values: Iterable[object]) -> FakeTensorMode | None:
    """The fake mode that the first fake tensor of ``values`` belongs to."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def inside_transform(tensor: torch.Tensor) -> bool:
    """Whether a transform of ``torch.func`` (``vmap``, ``grad``) is looking at a tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def trace(
    function: Callable,
    examples: list[torch.Tensor],
    mode: FakeTensorMode,
    device: torch.device | None = None,
) -> tuple[fx.Graph, Any]:
    """The operators that a function of a list of tensors calls, without gradients; on a device, if given.

    Returns:
        the graph, whose result is flat, and the pytree spec of what the function returned.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    tree = None

    def flat(tensors: list[torch.Tensor]) -> list:
        nonlocal tree
        leaves, tree = pytree.tree_flatten(function(tensors))
        return leaves

    with mode, torch.no_grad():  # a tensor that is given twice would be traced as one input
        given = [
            torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=device or e.device)
            for e in examples
        ]
        return make_fx(flat)(given).graph, tree


def known_shapes(mode: FakeTensorMode) -> dict[Any, Any]:
    """A place for what was computed under a fake mode, which lives as long: values hold their mode."""
    return mode.__dict__.setdefault("_stepgraph_known", {})


# ------------------------------------------------------------------------------------- capture


def decomposition(op: Any) -> Callable | None:
    """torch's own decomposition of an operator, if it has one."""
    return get_decompositions([op]).get(op)


@functools.cache
def decomposable_operators() -> dict[Any, Callable]:
    """All operators that torch can express through simpler ones."""
    return dict(core_aten_decompositions())


def has_sharding_rule(op: Any) -> bool:
    """Whether DTensor knows how to shard an operator."""
    propagator = _propagator()
    return (
        op in propagator.op_strategy_funcs
        or op in propagator.op_to_rules
        or op in _single_dim_rules()
    )


def joint_graph(
    captured: fx.GraphModule, args: tuple, decompositions: dict[Any, Callable]
) -> tuple[fx.GraphModule, Any]:
    """Forward and backward of a captured module as one functional ATen graph.

    Returns:
        the joint graph, and the pytree spec of the module's result.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(generating_late())
        joint = aot_export_joint_with_descriptors(
            stack, captured, args, decompositions=decompositions
        )
        return joint.graph_module, joint.out_spec


def descriptors(graph: fx.GraphModule) -> tuple[list[tuple[fx.Node, Any]], list[tuple[Any, Any]]]:
    """(placeholder, descriptor) and (result node or None, descriptor) pairs of a joint graph."""
    inputs, outputs = [], []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            inputs.append((node, node.meta["desc"]))
        elif node.op == "output":
            (results,) = node.args
            flat = torch.utils._pytree.tree_leaves(results, is_leaf=lambda x: x is None)
            outputs.extend(zip(flat, node.meta["desc"], strict=True))
    return inputs, outputs


def describe(descriptor: Any) -> tuple[str, Any]:
    """What a descriptor says, as (kind, payload).

    Kinds: ``param`` / ``buffer`` (flat name), ``plain`` (index), ``tangent``, ``output`` (index),
    ``mutation`` (the description of the input), ``grad`` (likewise), ``other``.
    """
    kind = type(descriptor).__name__
    if kind == "ParamAOTInput":
        return "param", descriptor.target
    if kind == "BufferAOTInput":
        return "buffer", descriptor.target
    if kind == "PlainAOTInput":
        return "plain", descriptor.idx
    if kind == "TangentAOTInput":
        return "tangent", describe(descriptor.output)
    if kind == "PlainAOTOutput":
        return "output", descriptor.idx
    if kind == "InputMutationAOTOutput":
        return "mutation", describe(descriptor.mutated_input)
    if kind == "GradAOTOutput":
        return "grad", describe(descriptor.grad_of)
    if kind.startswith("SubclassGetAttr"):  # a part of a tensor subclass
        return describe(descriptor.base)
    return "other", kind


@contextlib.contextmanager
def pretending_to_compile() -> Iterator[None]:
    """Lets torch.optim take the branches it takes under torch.compile (no ``.item()``)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Lets learning-rate schedulers know that a step was taken (they warn about the order)."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------ sharding


def _propagator():
    return DTensor._op_dispatcher.sharding_propagator


def _single_dim_rules() -> dict:
    # Newer table; absent on older releases.
    return getattr(_propagator(), "op_single_dim_strategy_funcs", {})


def planning_mesh(sizes: tuple[int, ...]) -> Any:
    """A DeviceMesh of these sizes without processes, to ask sharding rules on."""
    from torch.distributed.device_mesh import DeviceMesh

    # The rules ask the device for its number of devices per host; no tensor is ever placed on it.
    device_type = torch.get_default_device().type
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    names = tuple(f"d{axis}" for axis in range(len(sizes)))
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def shape_argument(op: Any) -> int | None:
    """Position of the argument that holds an operator's global output shape, if it has one."""
    index = _propagator().op_to_shape_and_stride_idx.get(op)
    return index[0] if isinstance(index, tuple) else index


def scalar_shape_adjuster(op: Any) -> Callable | None:
    """DTensor's function that turns scalar size arguments (group norm's N, C) into local ones."""
    return getattr(_propagator(), "op_to_scalar_shape_adjuster", SIZE_ADJUSTERS).get(op)


StridedShard = _StridedShard


def sum_over_group(tensor: torch.Tensor, group: str, kind: str = "sum") -> torch.Tensor:
    """The sum (or ``max``, ``min``) over a process group, by its name; called by every rank of it."""
    return WAIT(ALL_REDUCE(tensor, kind, group))


def gather_over_group(tensor: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """The ranks' tensors one behind the other along dimension 0."""
    return WAIT(ALL_GATHER(tensor, ranks, group))


def scatter_sum_over_group(tensor: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """This rank's rows of the sum over a process group."""
    return WAIT(REDUCE_SCATTER(tensor, "sum", ranks, group))


def tensor_spec(mesh: Any, placements: tuple, value: torch.Tensor) -> DTensorSpec:
    """A DTensorSpec for a value of global shape ``value.shape``."""
    meta = TensorMeta(torch.Size(value.shape), tuple(value.stride()), value.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def sharding_strategies(
    op: Any, args: tuple, kwargs: dict, output: object
) -> list[tuple[list[Any] | None, list[Any]]]:
    """DTensor's strategies for one operator call on a 1-D mesh.

    Args:
        op: the operator.
        args, kwargs: its arguments, each tensor replaced by a :func:`tensor_spec`.
        output: the node's ``val``: FakeTensor(s) of global shape.

    Returns:
        (placement of each tensor argument, placement of each result) per strategy, in the rules' own
        order; None for the arguments means "like the result".

    Raises:
        NotImplementedError: where DTensor has no rule. Rules raise all sorts of other errors on
            arguments they cannot handle; callers treat any exception as "no rule".
    """
    propagator = _propagator()
    single = _single_dim_rules().get(op)
    info = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(
        op
    ) or propagator.op_to_schema_info.get(op)
    schema = OpSchema(op, args, kwargs, schema_info=info)
    if single is not None:
        from torch.distributed.tensor._ops.single_dim_strategy import (
            _expand_single_dim_strategy_to_mesh,
        )

        wrapped = propagator._wrap_with_op_strategy(schema)
        mesh = next(spec.mesh for spec in _specs((args, kwargs)))
        expand = _expand_single_dim_strategy_to_mesh(mesh, wrapped, single, _meta_of(output))
        found = expand(op, wrapped.args_meta, wrapped.kwargs_meta)
    elif op in propagator.op_strategy_funcs:
        found = propagator.op_strategy_funcs[op](propagator._wrap_with_op_strategy(schema))
    elif op in propagator.op_to_rules:
        answer = propagator.op_to_rules[op](schema)
        if answer.output_spec is None:
            raise NotImplementedError(f"{op}: the rule wants its inputs redistributed")
        given = [spec.placements[0] for spec in _specs((args, kwargs))]
        return [(given, _placements(answer.output_spec, output))]
    else:
        raise NotImplementedError(f"{op} has no sharding rule")
    if isinstance(found, TupleStrategy):
        raise NotImplementedError(f"{op}: strategies over lists are not used")
    assert isinstance(found, OpStrategy)
    return [
        (
            None if s.input_specs is None else [spec.placements[0] for spec in s.input_specs],
            _placements(s.output_specs, output),
        )
        for s in found.strategies
    ]


def _specs(tree: object) -> list[DTensorSpec]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _placements(specs: object, output: object) -> list[Any]:
    if isinstance(specs, DTensorSpec):  # of each result, where there are several (torch 2.11)
        return [specs.placements[0]] * (len(output) if isinstance(output, (tuple, list)) else 1)
    if specs is None:
        return [None]
    assert isinstance(specs, (tuple, list))
    return [None if spec is None else spec.placements[0] for spec in specs]


def _meta_of(output: object):
    if isinstance(output, torch.Tensor):
        return TensorMeta(torch.Size(output.shape), tuple(output.stride()), output.dtype)
    if isinstance(output, (tuple, list)):
        return tuple(_meta_of(item) for item in output)
    return None


def adjust_scalar_shapes(
    op: Any, adjuster: Callable, args: tuple, kwargs: dict, specs: list[DTensorSpec]
) -> tuple:
    """Arguments with local sizes where the operator takes sizes as plain numbers."""
    return adjuster(specs, OpSchema(op, args, kwargs)).args_schema


def one_process_mesh(device_type: str, dims: tuple[tuple[str, int], ...]) -> Any:
    """A DeviceMesh of one rank that needs no process group."""
    from torch.distributed.device_mesh import DeviceMesh

    shape = torch.zeros([size for _, size in dims], dtype=torch.int)
    mesh = DeviceMesh(
        device_type, shape, mesh_dim_names=tuple(n for n, _ in dims), _init_backend=False, _rank=0
    )
    if not hasattr(mesh, "_dim_group_names"):  # dynamo looks for it
        mesh._dim_group_names = []
    return mesh


def rendezvous_store() -> Any:
    """The store by which the ranks of the default process group found each other.

    A connection of its own, where the store has connections: one thread's waiting is not another's.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # a kind that has no connections
        return store


# ----------------------------------------------------------------------------------- running


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Zeroes tensors in place, in one call."""
    torch._foreach_zero_(tensors)


def disable_compiler(function: Callable) -> Callable:
    """Keeps dynamo from tracing into ``function``."""
    return torch._dynamo.disable(function)


def is_fsdp(module: nn.Module) -> bool:
    """Whether a module, or a part of it, was wrapped by FSDP (either version)."""
    names = {cls.__name__ for part in module.modules() for cls in type(part).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})
