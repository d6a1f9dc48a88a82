"""Adds the update to a joint Program: scale, global-norm clipping, and torch's optimizer step.

Everything that depends on numbers and counters alone is emitted once for a parameter group (Adam's
bias corrections, say), so the update is as few operations per parameter as torch's own formula.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.update_rules import FunctionalOptimizer, UpdateRule
from stepgraph.capture.whole_tensors import Update
from stepgraph.errors import OptimizerError
from stepgraph.operators.updates import UPDATE
from stepgraph.program import roles
from stepgraph.program.build import Builder
from stepgraph.program.metadata import meta
from stepgraph.program.program import OPTIMIZER, Program, Value
from stepgraph.program.record import SUMMATION, Results, Values, program_pass

aten = torch.ops.aten


def _expected(
    values: Values,
    before: Program,
    after: Program,
    optimizer: FunctionalOptimizer | None,
    counters: SharedCounters,
) -> Results:
    """One step of the user's own optimizer, from the states that the program is run on."""
    results = values.execute(before)
    return results if optimizer is None else {**results, **values.stepped(results, after)}


@program_pass(
    reads="``Grad`` outputs",
    writes=(
        "optimizer operations; inputs ``OptimizerState`` and ``Scalar``; outputs "
        "``NewParam`` and ``NewOptimizerState``"
    ),
    preserves=SUMMATION,
    reference=_expected,
)
def update_parameters(
    program: Program, optimizer: FunctionalOptimizer | None, counters: SharedCounters
) -> Program:
    """Replaces each ``Grad`` output by the parameter's new value and optimizer states.

    Args:
        program: joint, its gradients complete (scaled, clipped).
        optimizer: the update rules; None: gradients are results.
        counters: says which parameters' step counters are one tensor.
    """
    if optimizer is None:
        return program
    adder = _Updates(program, optimizer, counters)
    for name, gradient in program.gradients.items():
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
        self.inputs = {role: node for role, node, _ in program.input_rows}
        self.new: dict[roles.Output, fx.Node] = {}
        self.scalars: dict[Any, fx.Node] = {}

    def update(self, name: str, gradient: fx.Node) -> None:
        """Instantiates the rule of one parameter."""
        parameter = self.inputs[roles.Param(name)]
        value = meta(parameter)["val"]
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
        self.new[roles.NewParam(name)] = results[0]
        for key, result in zip(rule.states, results[1:], strict=True):
            self.new.setdefault(roles.NewOptimizerState(owners[key], key), result)

    def _input(self, role: roles.Input, shape: Sequence[int], dtype, device) -> fx.Node:
        if role not in self.inputs:
            self.inputs[role] = self.emit.input(role, shape, dtype, device)
        return self.inputs[role]

    def _instantiate(self, rule: UpdateRule, arguments: list[fx.Node]) -> list[fx.Node]:
        remaining = iter(arguments)
        node_of: dict[fx.Node, fx.Node] = {}
        whole = rule.whole
        for node in rule.graph.graph.nodes:
            if node.op == "placeholder":
                node_of[node] = next(remaining)
            elif node.op == "get_attr":
                node_of[node] = self._constant(getattr(rule.graph, str(node.target)))
            elif node.op == "output":
                if whole is not None:
                    node_of |= self._updated(rule, whole, node_of)
                return [node_of[result] for result in node.args[0]]
            elif whole is None or not meta(node)["val"].dim():
                args, kwargs = map_arg((node.args, node.kwargs), node_of.__getitem__)
                node_of[node] = self._operation(node, tuple(args), dict(kwargs))
        raise AssertionError("a rule without an output")

    def _updated(
        self, rule: UpdateRule, whole: Update, node_of: dict[fx.Node, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """What the rule computes of whole tensors, as one operation."""
        tensors, numbers, settings = (
            [node_of[node] for node in nodes]
            for nodes in (whole.tensors, whole.numbers, rule.settings)
        )
        update = self.emit(UPDATE, tensors, numbers, whole.text, rule.kernel, settings)
        return {
            result: self.emit(operator.getitem, update, index)
            for index, result in enumerate(whole.results)
        }

    def _constant(self, value: torch.Tensor) -> fx.Node:
        """A number that torch's step made a tensor of."""
        if value.dim():
            raise OptimizerError("the optimizer's step holds a constant that is not a number")
        like = {"dtype": value.dtype, "device": value.device}
        return self._scalar(aten.full.default, ([], value.item()), like)

    def _operation(self, node: fx.Node, args: tuple, kwargs: dict) -> fx.Node:
        if meta(node)["val"].dim():
            return self.emit(node.target, *args, **kwargs)
        return self._scalar(node.target, args, kwargs)

    def _scalar(self, target: Any, args: tuple, kwargs: dict) -> fx.Node:
        """Numbers and counters: the same for all parameters of a group, so computed once."""
        key = (target, _key(args), _key(kwargs))
        if key not in self.scalars:
            self.scalars[key] = self.emit(target, *args, **kwargs)
        return self.scalars[key]

    def finish(self) -> None:
        """New parameters stand in the place of their gradients."""
        kept = [
            row
            for row in self.program.output_rows
            if not (isinstance(row[0], roles.Grad) and roles.NewParam(row[0].name) in self.new)
        ]
        made = [(role, node, Value.of(node)) for role, node in self.new.items()]
        self.program.set_outputs(kept + made)
        self.program.finish()


def _key(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, (tuple, list)):
        return tuple(_key(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _key(item)) for name, item in argument.items())
    return (type(argument).__name__, str(argument))
