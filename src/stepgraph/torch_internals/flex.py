"""``flex_attention``: torch's plain form of it, its kernel, and the check before it on hosts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention as _flex
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import (
    create_fw_bw_graph,
    flex_attention,
    flex_attention_backward,
    math_attention,
)

from stepgraph.torch_internals.inductor.whole_step import compile_with_inductor

FLEX = flex_attention
aten = torch.ops.aten


def spelt_out(*arguments: Any) -> tuple[Tensor, ...]:
    """What torch's operator computes, in arithmetic; a graph's code could not name torch's function."""
    return math_attention(*arguments)


@contextlib.contextmanager
def differentiable_on_host() -> Iterator[None]:
    """Within it, dynamo captures a call on the host that learns: it will run in another form."""
    check = _flex._validate_device
    _flex._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        _flex._validate_device = check


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Within it gradients can be asked for, also inside an operator, which is called below autograd."""
    key = torch._C.DispatchKey
    autograd = torch._C.DispatchKeySet(key.AutogradFunctionality)
    for one in (key.AutogradOther, key.ADInplaceOrView):
        autograd = autograd | torch._C.DispatchKeySet(one)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


# Made of nothing but a number, though a tensor says of which type.
_CONSTANTS = (
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.ones_like.default,
    aten.zeros_like.default, aten.full_like.default,
)  # fmt: skip


def scalar_graph(function: fx.GraphModule) -> fx.Graph:
    """The operators of a score or mask function that dynamo captured, on single numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from stepgraph.torch_internals import fake_mode_of

    nodes = function.graph.find_nodes(op="placeholder")
    examples = [node.meta["example_value"] for node in nodes]
    with fake_mode_of(examples), TransformGetItemToIndex(), torch.no_grad():  # type: ignore[attr-defined]
        graph = make_fx(function, decomposition_table=get_decompositions(_CONSTANTS))(
            *examples
        ).graph
    graph.eliminate_dead_code()
    return graph


class Call(NamedTuple):
    """The arguments of torch's operator.

    ``mask`` is the block mask as torch has it, its function last; ``others`` are the tensors that the score
    and mask functions look into.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score: Callable[..., Tensor]
    mask: tuple[Any, ...]
    scale: float
    options: dict[str, Any]
    others: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """The result and the sums of its rows, by torch's operator, which has a kernel once it is compiled."""
    options = {**call.options, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    return flex_attention(*call._replace(options=options)[:-1], *call.others)[:2]


def backward(
    call: Call, result: Tensor, sums: Tensor, gradient: Tensor, joint: fx.GraphModule
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, and of each tensor that scores look into, by torch's operator."""
    options = {**call.options, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    *found, of_others = flex_attention_backward(
        *call[:3], result, sums, gradient, None, call.score, joint, call.mask, call.scale, options,
        *call.others,
    )  # fmt: skip
    return (*found, *of_others)


def joint_graph(call: Call, learned: Sequence[int]) -> fx.GraphModule:
    """The score function and its gradients, of some of the tensors that it looks into."""
    with differentiating(), TransformGetItemToIndex():
        numbers = [call.query.new_zeros((), requires_grad=True)]
        numbers += [call.query.new_zeros((), dtype=torch.int) for _ in range(4)]
        others = [t.detach().requires_grad_(i in learned) for i, t in enumerate(call.others[0])]
        return create_fw_bw_graph(call.score, tuple(numbers), tuple(others))[1]  # type: ignore[arg-type]


def operator_graph(
    function: Callable[..., tuple], examples: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph that calls torch's operator, which keeps its functions as graphs; and what it was traced on.

    Args:
        function: of tensors like the examples.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    from stepgraph.torch_internals import new_fake_mode

    with new_fake_mode(), torch.no_grad():
        fakes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in examples
        ]
        return make_fx(function)(*fakes), fakes


def compiled(function: Callable[..., tuple], examples: Sequence[Tensor]) -> Callable[[list], Any]:
    """A function that calls torch's operator as inductor compiles it: with its kernel."""
    graph, fakes = operator_graph(function, examples)
    return compile_with_inductor(graph, fakes, {}, True, {})
