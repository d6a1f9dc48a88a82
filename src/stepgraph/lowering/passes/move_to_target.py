"""A Program that was captured on the host becomes one of the device that it runs on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from stepgraph import torch_internals
from stepgraph.operators import table as operators
from stepgraph.operators.by_rows import PRODUCTS
from stepgraph.operators.views import viewed
from stepgraph.planning.target import Target
from stepgraph.program import roles
from stepgraph.program.build import ShapeRunner, kind_of
from stepgraph.program.copies import is_on_host
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensors_of
from stepgraph.program.record import program_pass
from stepgraph.torch_internals import operators as private
from stepgraph.torch_internals.code import inputs_of

aten = torch.ops.aten


@program_pass(
    reads="the target",
    writes="devices: of values, of what makes tensors, of constants; types and strides of results",
)
def move_to_target(program: Program, target: Target) -> Program:
    """Every value, and what names a device, is on that of the target; what is offloaded stays on the host.

    Results are what the device's kernels give (a norm's statistics are float32 there). Constants are moved
    where the device is there, and else, in a plan, stay where they are.
    """
    host = torch_internals.host_device().type
    on_host = {node for role, node, _ in program.input_rows if isinstance(role, roles.HostSeed)}
    on_host |= {*filter(is_on_host, program.graph.nodes)}
    values = (tensors_of(meta(n).get("val")) for n in program.graph.nodes if n not in on_host)
    devices = {tensor.device.type for found in values for tensor in found}
    if devices <= {target.device_type}:
        return program
    shapes = ShapeRunner(program.graph)
    mode = shapes.mode
    known: dict[tuple, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == host:
            return torch.device(target.device_type)
        if not isinstance(value, torch.Tensor) or value.device.type != host:
            return value
        kind = kind_of(value)
        if (there := known.get(kind)) is None:
            with mode, torch.no_grad():
                shape, strides, dtype, _ = kind
                there = torch.empty_strided(shape, strides, dtype=dtype, device=target.device_type)
            known[kind] = there
        return there

    others: set[fx.Node] = set()  # those whose results have another type there, or other strides
    for node in program.graph.nodes:
        if node in on_host:
            continue
        if _names_a_device(node.args) or _names_a_device(node.kwargs.values()):
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), moved)  # type: ignore
        if node.target is private.TO_COPY and not node.all_input_nodes:  # of a number
            node.kwargs = {**node.kwargs, "device": torch.device(target.device_type)}
        if "val" in meta(node):
            value = meta(node)["val"]
            one = isinstance(value, torch.Tensor)
            expected = moved(value) if one else map_aggregate(value, moved)
            meta(node)["val"] = expected
            if not _is_the_same(node, others):
                found = meta(node)["val"] = _there(node, expected, shapes)
                others |= {node} if _kinds(found) != _kinds(expected) else set()
        if node.op == "get_attr" and torch_internals.is_there(target.device_type):
            _move_constant(program.module, node, target.device_type)
    return program


def _names_a_device(arguments: Iterable[Any]) -> bool:
    """Whether a device, or a tensor, is among arguments: most have none."""
    for argument in arguments:
        if isinstance(argument, (torch.device, torch.Tensor)):
            return True
        if isinstance(argument, (tuple, list)) and _names_a_device(argument):
            return True
    return False


def _is_the_same(node: fx.Node, others: set[fx.Node]) -> bool:
    """Whether an operation surely gives what it gives on the host, but for the device."""
    known = operators.of(node.target)
    # Of an expand of a length of 1 torch does not always say the same stride.
    shows = viewed(node) is not None and node.target is not aten.expand.default
    alike = known.elementwise or known.copies or shows or node.target in PRODUCTS
    return alike and others.isdisjoint(inputs_of(node))


def _kinds(value: Any) -> list[Any]:
    return [kind_of(tensor) for tensor in tensors_of(value)]


def _there(node: fx.Node, expected: Any, shapes: ShapeRunner) -> Any:
    """What an operation gives on the device; what was expected, where torch cannot tell without one."""
    if node.op != "call_function":
        return expected
    try:
        found = shapes.run(node.target, node.args, node.kwargs)
    except Exception:  # a convolution asks the driver; a view finds other strides
        return expected
    if found is expected:
        return found
    pairs = zip(tensors_of(found), tensors_of(expected), strict=False)
    same = all(a.shape == b.shape and a.device == b.device for a, b in pairs)
    return found if same and len(tensors_of(found)) == len(tensors_of(expected)) else expected


def _move_constant(module: fx.GraphModule, node: fx.Node, device_type: str) -> None:
    constant = getattr(module, str(node.target))
    if isinstance(constant, torch.Tensor):
        setattr(module, str(node.target), constant.to(device_type))
