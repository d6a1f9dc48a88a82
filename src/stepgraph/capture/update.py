"""Adds the update to a joint Program: scale, global-norm clipping, and torch's optimizer step.

Everything that depends on numbers and counters alone is emitted once for a parameter group (Adam's
bias corrections, say), so the update is as few operations per parameter as torch's own formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from stepgraph import torch_internals
from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.optimizer import FunctionalOptimizer, UpdateRule
from stepgraph.errors import OptimizerError, name_a_few
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.names import name_operations
from stepgraph.program.program import OPTIMIZER, Program, Value
from stepgraph.torch_internals.code import graph_module

aten = torch.ops.aten
MAX_GRAD_NORM = "max_grad_norm"
_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm it divides by


def given_gradients(model: nn.Module, names: Sequence[str], device: torch.device) -> Program:
    """A Program whose gradients are inputs, for the passes that update parameters.

    Args:
        names: of the parameters that have one.
        device: where the parameters are when the program runs.
    """
    graph, mode = fx.Graph(), torch_internals.new_fake_mode()
    inputs: list[roles.Input] = []
    values: list[Value] = []
    gradients: list[fx.Node] = []
    for name in names:
        parameter = model.get_parameter(name)
        for role in (roles.Param(name), roles.GivenGrad(name)):
            with mode:
                fake = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device=device)
            node = graph.placeholder(f"input_{len(inputs)}")
            node.meta = {"val": fake, "name": roles.label(role)}
            inputs.append(role)
            values.append(Value(tuple(parameter.shape), parameter.dtype))
        gradients.append(node)
    graph.output(tuple(gradients))
    outputs: list[roles.Output] = [roles.Grad(name) for name in names]
    module = graph_module(nn.Module(), graph)
    return Program("update", module, inputs, outputs, values, values[1::2])


def update_parameters(
    program: Program, optimizer: FunctionalOptimizer, counters: SharedCounters
) -> Program:
    """Replaces each ``Grad`` output by the parameter's new value and optimizer states.

    Args:
        program: joint, its gradients complete (scaled, clipped).
        optimizer: the update rules.
        counters: says which parameters' step counters are one tensor.

    reads: ``Grad`` outputs. writes: optimizer operations; inputs ``OptimizerState`` and ``Scalar``;
    outputs ``NewParam`` and ``NewOptimizerState``. preserves: the loss.
    """
    adder = _Updates(program, optimizer, counters)
    gradients = [
        (role.name, node)
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.Grad)
    ]
    for name, gradient in gradients:
        if name in optimizer.group_of:
            adder.update(name, gradient)
    adder.finish()
    return program


class _Updates:
    def __init__(
        self, program: Program, optimizer: FunctionalOptimizer, counters: SharedCounters
    ) -> None:
        self.program, self.optimizer, self.counters = program, optimizer, counters
        self.emit = Builder(program, OPTIMIZER)
        self.inputs = dict(zip(program.inputs, program.placeholders, strict=True))
        self.new: dict[roles.Output, tuple[fx.Node, Value]] = {}
        self.scalars: dict[Any, fx.Node] = {}

    def update(self, name: str, gradient: fx.Node) -> None:
        """Instantiates the rule of one parameter."""
        parameter = self.inputs[roles.Param(name)]
        value = parameter.meta["val"]
        rule = self.optimizer.rule(name, value)
        group = f"group{self.optimizer.group_of[name]}"
        owners = {key: self.counters.owner(name, key) for key in rule.states}
        device = value.device
        states = [
            self._input(roles.OptimizerState(owners[key], key), spec.shape, spec.dtype, device)
            for key, spec in rule.states.items()
        ]
        numbers = [
            self._input(roles.Scalar(f"{group}.{number}"), (), torch.float64, device)
            for number in rule.numbers
        ]
        self.emit.module = name.rpartition(".")[0]
        results = self._instantiate(rule, [parameter, gradient, *states, *numbers])
        self._set(roles.NewParam(name), results[0])
        for key, result in zip(rule.states, results[1:], strict=True):
            role = roles.NewOptimizerState(owners[key], key)
            if role not in self.new:
                self._set(role, result)

    def _set(self, role: roles.Output, node: fx.Node) -> None:
        value = node.meta["val"]
        self.new[role] = (node, Value(tuple(value.shape), value.dtype))

    def _input(self, role: roles.Input, shape: Sequence[int], dtype, device) -> fx.Node:
        if role not in self.inputs:
            self.inputs[role] = self.emit.input(
                roles.label(role), lambda: torch.empty(shape, dtype=dtype, device=device)
            )
        return self.inputs[role]

    def _instantiate(self, rule: UpdateRule, arguments: list[fx.Node]) -> list[fx.Node]:
        remaining = iter(arguments)
        node_of: dict[fx.Node, fx.Node] = {}
        for node in rule.graph.graph.nodes:
            if node.op == "placeholder":
                node_of[node] = next(remaining)
            elif node.op == "get_attr":
                node_of[node] = self._constant(getattr(rule.graph, str(node.target)))
            elif node.op == "output":
                return [node_of[result] for result in node.args[0]]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), node_of.__getitem__)
                node_of[node] = self._operation(node, tuple(args), dict(kwargs))
        raise AssertionError("a rule without an output")

    def _constant(self, value: torch.Tensor) -> fx.Node:
        """A number that torch's step made a tensor of."""
        if value.dim():
            raise OptimizerError("the optimizer's step holds a constant that is not a number")
        like = {"dtype": value.dtype, "device": value.device}
        return self._scalar(aten.full.default, ([], value.item()), like)

    def _operation(self, node: fx.Node, args: tuple, kwargs: dict) -> fx.Node:
        if node.meta["val"].dim():
            return self.emit(node.target, *args, **kwargs)
        return self._scalar(node.target, args, kwargs)

    def _scalar(self, target: Any, args: tuple, kwargs: dict) -> fx.Node:
        """Numbers and counters: the same for all parameters of a group, so computed once."""
        key = (target, _key(args), _key(kwargs))
        if key not in self.scalars:
            self.scalars[key] = self.emit(target, *args, **kwargs)
        return self.scalars[key]

    def finish(self) -> None:
        """Rewrites inputs and outputs of the Program."""
        program = self.program
        roles_of = {node: role for role, node in self.inputs.items()}
        values = dict(
            zip(program.placeholders[: len(program.inputs)], program.input_values, strict=False)
        )
        program.inputs = [roles_of[node] for node in program.placeholders]
        program.input_values = [
            values.get(node) or Value(tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for node in program.placeholders
        ]
        kept = [
            (role, node, value)
            for role, node, value in zip(
                program.outputs, program.results, program.output_values, strict=True
            )
            if not (isinstance(role, roles.Grad) and roles.NewParam(role.name) in self.new)
        ]
        kept += [(role, node, value) for role, (node, value) in self.new.items()]
        program.outputs = [role for role, _, _ in kept]
        program.output_values = [value for _, _, value in kept]
        program.graph.output_node().args = (tuple(node for _, node, _ in kept),)
        name_operations(program.graph)
        program.finish()


def _key(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, (tuple, list)):
        return tuple(_key(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _key(item)) for name, item in argument.items())
    return (type(argument).__name__, str(argument))


def clip_gradients(program: Program) -> Program:
    """Scales all gradients so that their global 2-norm is at most the input ``max_grad_norm``.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``; the squares are summed so that sharded
    gradients cost one reduction of one number.

    reads: ``Grad`` outputs. writes: optimizer operations; the input ``Scalar(max_grad_norm)``.
    preserves: the loss.
    """
    emit = Builder(program, OPTIMIZER)
    gradients = {
        role: node
        for role, node in zip(program.outputs, program.results, strict=True)
        if isinstance(role, roles.Grad)
    }
    device = next(iter(gradients.values())).meta["val"].device
    limit = emit.input(
        roles.label(roles.Scalar(MAX_GRAD_NORM)),
        lambda: torch.empty((), dtype=torch.float64, device=device),
    )
    program.inputs.insert(program.placeholders.index(limit), roles.Scalar(MAX_GRAD_NORM))
    program.input_values.insert(program.placeholders.index(limit), Value((), torch.float64))
    # 0-dim gradients last: they are whole on every rank, unlike the sums before them.
    total = None
    for gradient in sorted(gradients.values(), key=lambda node: node.meta["val"].dim() == 0):
        wide = gradient
        if gradient.meta["val"].dtype.itemsize < 4:
            wide = emit(aten._to_copy.default, gradient, dtype=torch.float32)
        squares = emit(aten.sum.default, emit(aten.mul.Tensor, wide, wide))
        # Padding of an uneven shard is zero, and so is its square: it may be summed.
        squares.meta["padding_is_zero"] = True
        total = squares if total is None else emit(aten.add.Tensor, total, squares)
    assert total is not None
    norm = emit(aten.sqrt.default, total)
    wanted = emit(aten.div.Tensor, limit, emit(aten.add.Scalar, norm, _TINY))
    coefficient = emit(aten.clamp.default, wanted, None, 1.0)
    results = list(program.results)
    factors: dict[torch.dtype, fx.Node] = {}
    for role, gradient in gradients.items():
        dtype = gradient.meta["val"].dtype  # as the factor's, or a 0-dim gradient is promoted
        if dtype not in factors:
            factors[dtype] = emit(aten._to_copy.default, coefficient, dtype=dtype)
        clipped = emit(aten.mul.Tensor, gradient, factors[dtype])
        results[program.outputs.index(role)] = clipped
    program.graph.output_node().args = (tuple(results),)
    name_operations(program.graph)
    return program.finish()


def parameters_without_gradient(model: nn.Module, joint: Program) -> list[str]:
    """A note that names them, if there are any."""
    with_gradient = {role.name for role in joint.outputs if isinstance(role, roles.Grad)}
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in with_gradient
    ]
    if not missing:
        return []
    shown = name_a_few(missing)
    return [f"parameters that get no gradient are neither updated nor decayed: {shown}"]
