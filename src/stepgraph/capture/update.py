"""Adds the update to a joint Program: scale, global-norm clipping, and torch's optimizer step.

Everything that depends on numbers and counters alone is emitted once for a parameter group (Adam's
bias corrections, say), so the update is as few operations per parameter as torch's own formula.
"""

from collections.abc import Sequence

import torch
from torch import fx, nn

from stepgraph import torch_internals
from stepgraph.errors import name_a_few
from stepgraph.program import roles
from stepgraph.program.metadata import set_meta
from stepgraph.program.program import Program, Value
from stepgraph.torch_internals.code import graph_module

aten = torch.ops.aten
MAX_GRAD_NORM = "max_grad_norm"


def given_gradients(model: nn.Module, names: Sequence[str]) -> Program:
    """A Program whose gradients are inputs, for the passes that update parameters.

    Args:
        names: of the parameters that have one.
    """
    graph, mode = fx.Graph(), torch_internals.new_fake_mode()
    host = torch_internals.host_device()
    inputs: list[roles.Input] = []
    values: list[Value] = []
    gradients: list[fx.Node] = []
    for name in names:
        parameter = model.get_parameter(name)
        for role in (roles.Param(name), roles.GivenGrad(name)):
            with mode:
                fake = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device=host)
            node = graph.placeholder(f"input_{len(inputs)}")
            set_meta(node, {"val": fake, "name": roles.label(role)})
            inputs.append(role)
            values.append(Value(tuple(parameter.shape), parameter.dtype))
        gradients.append(node)
    graph.output(tuple(gradients))
    outputs: list[roles.Output] = [roles.Grad(name) for name in names]
    module = graph_module(nn.Module(), graph)
    return Program("update", module, inputs, outputs, values, values[1::2])


def parameters_without_gradient(model: nn.Module, joint: Program) -> list[str]:
    """A note that names them, if there are any."""
    with_gradient = joint.gradients
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in with_gradient
    ]
    if not missing:
        return []
    shown = name_a_few(missing)
    return [f"parameters that get no gradient are neither updated nor decayed: {shown}"]
