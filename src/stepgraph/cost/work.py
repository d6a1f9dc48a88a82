"""What one operation has to do: FLOPs from shapes by formula, bytes from its traffic, and its time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from stepgraph.cost.device import Device
from stepgraph.operators import own
from stepgraph.operators import table as operators
from stepgraph.operators.updates import (
    COPIED,
    FUSED_ADAM,
    PIECE,
    UPDATE,
    held_inside,
    operations_in,
)
from stepgraph.operators.views import is_view
from stepgraph.program.build import freeze, kind_of
from stepgraph.program.collectives import is_collective
from stepgraph.program.copies import WAITS
from stepgraph.program.metadata import meta
from stepgraph.program.names import operation_name
from stepgraph.program.program import tensor_arguments, tensors_of
from stepgraph.torch_internals import fake_mode_of

aten = torch.ops.aten


def flops_of(target: Any, arguments: Sequence[Any], result: Any) -> float:
    """FLOPs of one call: two for each multiply-add of products, convolutions and attention, else 0.

    Args:
        target: the operator.
        arguments: its positional arguments, values or fake tensors in the place of nodes.
        result: its value (fake tensors).

    Attention that is causal does half of the products, as the kernels do; a backward that
    recomputes the scores has five products for the forward's two.
    """
    if not hasattr(target, "overloadpacket"):
        return 0.0
    if (left := _LEFT_FACTOR.get(target)) is not None:
        return 2.0 * result.numel() * arguments[left].shape[-1]
    if (products := _attention_products(target)) is not None:
        return _attention(target, arguments, products)
    registered = flop_registry.get(target.overloadpacket)
    return float(registered(*arguments, out_val=result)) if registered is not None else 0.0


# Position of a product's left factor among its arguments.
_LEFT_FACTOR: dict[Any, int] = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1,
    aten.addmm_.default: 1,
}  # fmt: skip


def _attention_products(target: Any) -> int | None:
    """Products of queries x keys x head size in an attention kernel; None for another operator."""
    name = target._schema.name.split("::")[-1]
    if "attention" not in name or own.is_own(target):
        return None
    return 5 if name.endswith("backward") else 2


def _attention(target: Any, arguments: Sequence[Any], products: int) -> float:
    """Queries, keys and values are the first (in a backward the second to fourth) 4-d arguments."""
    four = [a for a in arguments if isinstance(a, torch.Tensor) and a.dim() == 4]
    query, key = (four[0], four[1]) if products == 2 else (four[1], four[2])
    batch, heads, queries, width = query.shape
    flops = products * 2.0 * batch * heads * queries * key.shape[2] * width
    return flops / 2 if _is_causal(target, arguments) else flops


def _is_causal(target: Any, arguments: Sequence[Any]) -> bool:
    names = [argument.name for argument in target._schema.arguments]
    return any(n == "is_causal" and a is True for n, a in zip(names, arguments, strict=False))


def matmul_dtype(node: fx.Node) -> torch.dtype:
    """The type that an operation computes in: that of its first floating-point argument, or result."""
    values = [meta(a).get("val") for a in tensor_arguments(node)]
    for value in [*values, meta(node).get("val")]:
        for tensor in tensors_of(value):
            if tensor.dtype.is_floating_point:
                return tensor.dtype
    return torch.float32


def node_flops(node: fx.Node) -> float:
    """:func:`flops_of` a node, by its local shapes; what its author says, where it is not torch's."""
    if (told := own.cost_of(node)) is not None:
        return told[0]
    arguments = fx.node.map_arg(node.args, lambda a: meta(a).get("val"))
    return flops_of(node.target, arguments, meta(node).get("val"))


def size_in_bytes(value: object) -> int:
    """Of a value, or of all tensors in a tuple."""
    try:
        return value._stepgraph_bytes  # type: ignore[attr-defined]  # asked for by every pass
    except AttributeError:
        if not isinstance(value, torch.Tensor):
            return sum(map(size_in_bytes, tensors_of(value)))
    size = value.numel() * value.element_size()
    if fake_mode_of([value]) is not None:  # it stays so, and is nobody else's
        value._stepgraph_bytes = size  # type: ignore[attr-defined]
    return size


def workspace(node: fx.Node) -> int:
    """Bytes that an operation holds while it runs by itself, besides its arguments and results."""
    if node.target is FUSED_ADAM:  # gradients that are scaled first
        sizes = [size_in_bytes(meta(gradient)["val"]) for gradient in node.args[1]]  # type: ignore[union-attr]
        return max(*sizes, min(COPIED, sum(sizes))) if node.args[-1] is not None else 0
    if node.target is not UPDATE or not meta(node).get("dispatched", True):
        return 0
    made = tensors_of(meta(node)["val"])
    more = max(0, held_inside(str(node.args[2])) - len(made))
    return more * min(made[0].numel(), PIECE) * made[0].element_size()


def stored_bytes(value: object) -> int:
    """Bytes that lie behind a value; what an ``expand`` repeats counts once."""
    total = 0
    for tensor in tensors_of(value):
        size = tensor.element_size()
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size *= length if stride else min(length, 1)
        total += size
    return total


def looks_up(node: fx.Node) -> bool:
    """Whether an operation reads no more of its first argument, a table, than it returns."""
    return operators.of(node.target).looks_up


def bytes_moved(node: fx.Node) -> float:
    """Bytes that an operation reads and writes, by its ``traffic``; without one, all of them."""
    if (told := own.cost_of(node)) is not None:
        return told[1]
    arguments = tensor_arguments(node)
    reads, writes = meta(node).get("traffic", ((), True))
    if len(reads) != len(arguments):  # a node that placement put in, or gave other arguments
        reads = (True,) * len(arguments)
    result = stored_bytes(meta(node).get("val"))
    moved = result if writes else 0
    if node.target is FUSED_ADAM:  # three of four are written as well
        moved += 3 * size_in_bytes([meta(tensor)["val"] for tensor in node.args[0]])  # type: ignore[union-attr]
    for position, (argument, read) in enumerate(zip(arguments, reads, strict=True)):
        if read:
            size = stored_bytes(meta(argument).get("val"))
            moved += min(size, result) if position == 0 and looks_up(node) else size
    return moved


def runs_no_kernel(node: fx.Node) -> bool:
    """Whether an operation costs the compute stream nothing: a view, a wait, a collective."""
    return is_collective(node) or node.target in WAITS or is_view(node)


def operation_seconds(node: fx.Node, device: Device) -> float:
    """Time of a placed operation on one rank's compute stream; collectives have their own.

    A view or a wait takes none, but for the host time of calling it where each operation is called by
    itself and the host is what computes.
    """
    calls = len(operations_in(str(node.args[2]))) if node.target is UPDATE else 1
    called = calls * device.dispatch_seconds if meta(node).get("dispatched", False) else 0.0
    if is_collective(node):
        return 0.0
    if runs_no_kernel(node):
        return called
    return called + device.seconds(
        node_flops(node),
        bytes_moved(node),
        matmul_dtype(node),
        # the host time of a call contains the floor of its kernel
        meta(node).get("starts", True) and not called,
        family_of(node.target, node.args),
        vector_seconds(node, device),
    )


def remembered(
    device: Device, seconds: Callable[[fx.Node, Device], float] = operation_seconds
) -> Callable[[fx.Node], tuple[float, float]]:
    """Seconds and FLOPs of operations on a device; layers that repeat are asked about once."""
    known: dict[Any, tuple[float, float]] = {}

    def work(node: fx.Node) -> tuple[float, float]:
        tags = meta(node)
        made = tuple(map(kind_of, tensors_of(tags.get("val"))))
        call = id(node.target), freeze(node.args), freeze(node.kwargs), made
        key = *call, tags.get("traffic"), tags.get("starts"), tags.get("dispatched")
        if (found := known.get(key)) is None:
            flops = 0.0 if runs_no_kernel(node) else node_flops(node)
            found = known[key] = seconds(node, device), flops
        return found

    return work


def family_of(target: Any, arguments: Sequence[Any] = ()) -> str:
    """Which kind of product a call is, as :attr:`Device.families` has them."""
    schema = getattr(target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else ""
    for family in ("attention", "convolution"):
        if family in name:
            causal = "_causal" if family == "attention" and _is_causal(target, arguments) else ""
            backward = "_backward" if name.endswith("backward") else ""
            return family + causal + backward
    return "batched" if target in (aten.bmm.default, aten.baddbmm.default) else "matmul"


def vector_seconds(node: fx.Node, device: Device) -> float:
    """Time of an operation's arithmetic, where the device has a figure for its class."""
    if node.target is UPDATE:
        return _update_seconds(node, device)
    name = operators.of(node.target).cost
    if node.target is aten.clone.default and _turns(node):
        name = "transposition"
    if operators.of(node.target).power and node.args[1] not in (0.5, 1, 2):
        name = "power"  # those are products and roots
    each = device.elements.get(name, 0.0)
    if not each:
        return 0.0
    values = [meta(node).get("val"), *(meta(a).get("val") for a in tensor_arguments(node))]
    table = values[1] if operators.of(node.target).looks_up else None
    sizes = [t.numel() for v in values if v is not table for t in tensors_of(v)]
    return each * max(sizes, default=0)


def _update_seconds(node: fx.Node, device: Device) -> float:
    """Of all the arithmetic in an update."""
    kinds = (operators.of(target).cost for target in operations_in(str(node.args[2])))
    each = sum(device.elements.get(kind, 0.0) for kind in kinds if kind)
    return each * max(tensor.numel() for tensor in tensors_of(meta(node)["val"]))


def _turns(node: fx.Node) -> bool:
    """Whether a copy's dimensions lie in another order than those of what it copies."""
    source, copy = (meta(n).get("val") for n in (node.all_input_nodes[0], node))
    if not isinstance(source, torch.Tensor) or not isinstance(copy, torch.Tensor):
        return False
    dims = [d for d in range(source.dim()) if source.shape[d] > 1 and source.stride(d)]
    orders = [sorted(dims, key=tensor.stride, reverse=True) for tensor in (source, copy)]
    return orders[0] != orders[1]


def cost_group(node: fx.Node) -> str:
    """What costs are added up under: the operation's stable kind, layers of one block together."""
    parts = meta(node).get("module", "").split(".")
    path = ".".join("*" if part.isdigit() else part for part in parts)
    kind = operation_name(node)
    phase = meta(node).get("phase", "")
    return f"{path}/{kind}.{phase}".lstrip("/")
