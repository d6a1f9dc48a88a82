"""What a Program says of its values, against what its operations give on fake tensors of a device."""

import torch
from torch import fx
from torch.utils import _pytree as pytree

from stepgraph import torch_internals
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensors_of

HOST_ONLY = ("_for_cpu", "_local_scalar_dense", "aten.item")


def differences(program: Program, device_type: str) -> list[str]:
    """A line for each value that is not as said, or elsewhere, and for each operator of the host alone.

    A convolution asks the driver which kernel it is, and is believed.
    """
    found = []
    mode = torch_internals.fake_mode_of(meta(node)["val"] for node in program.placeholders)
    for node in program.graph.nodes:
        tensors = tensors_of(meta(node).get("val"))
        found += [
            f"{node}: on {t.device}" for t in tensors if t.dim() and t.device.type != device_type
        ]
        if node.op != "call_function":
            continue
        name = str(node.target)
        if device_type != "cpu" and any(part in name for part in HOST_ONLY):
            found.append(name)
        if device_type != "cpu" and "convolution" in name:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: meta(n)["val"])
        with mode, torch.no_grad():
            result = node.target(*args, **kwargs)
        said = pytree.tree_leaves(meta(node)["val"])
        for a, b in zip(pytree.tree_leaves(result), said, strict=True):
            if isinstance(a, torch.Tensor) and _kind(a) != _kind(b):
                found.append(f"{meta(node)['name']}: {name} gives {_kind(a)}, not {_kind(b)}")
    return found


def _kind(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type
