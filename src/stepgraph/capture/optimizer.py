"""A torch optimizer as functional graphs: one small graph per kind of parameter.

torch's own ``step()`` is traced on one stand-in parameter for each distinct (parameter group, shape,
dtype); the graph is then instantiated for every parameter of that kind, so tracing does not grow
with the number of layers. The arithmetic is torch's own, on its single-tensor path.

Numbers of a parameter group (``lr``, ``betas``, ``weight_decay``...) become 0-dim float64 inputs. A
torch function mode makes that possible: ``value=`` and ``alpha=`` arguments, which torch takes only
as plain numbers, are written out with tensors, and a comparison such as ``weight_decay != 0`` is
answered from the present value and remembered as a :class:`Condition` that must go on holding.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from stepgraph import torch_internals
from stepgraph.capture.masked_writes import MASKED_WRITES
from stepgraph.capture.passes.drop_identities import IDENTITIES, copies_alike, lie_alike
from stepgraph.capture.update_rules import (
    FIRST_STEP,
    Condition,
    FunctionalOptimizer,
    StateSpec,
    UpdateRule,
    with_kernel,
)
from stepgraph.errors import OptimizerError
from stepgraph.program.metadata import meta

# Options that choose an implementation, not a result; the single-tensor path is what is traced.
_IMPLEMENTATION = {"foreach": False, "fused": False, "differentiable": False}


def group_numbers(group: dict[str, Any]) -> dict[str, float]:
    """All numbers in a parameter group, tuples spread out: ``{"lr": .., "betas.0": ..}``."""
    numbers: dict[str, float] = {}
    for key, value in group.items():
        if key in ("params", "initial_lr") or isinstance(value, (bool, str)) or value is None:
            continue
        items = value if isinstance(value, (tuple, list)) else [value]
        for index, item in enumerate(items):
            if isinstance(item, torch.Tensor) and item.numel() != 1:
                continue
            if isinstance(item, (Real, torch.Tensor)) and not isinstance(item, bool):
                name = f"{key}.{index}" if isinstance(value, (tuple, list)) else key
                numbers[name] = float(item)
    return numbers


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Everything in a parameter group that is no number: flags, and which numbers there are."""
    settings = {
        key: value
        for key, value in group.items()
        if isinstance(value, (bool, str)) or value is None
    }
    return settings | {"numbers": tuple(group_numbers(group)), "parameters": len(group["params"])}


def functionalize_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]
) -> FunctionalOptimizer:
    """Traces ``optimizer.step()`` once for every kind of parameter.

    Args:
        optimizer: over some or all of ``parameters``.
        parameters: the parameters that get a gradient, under their names; only shapes are read.

    Raises:
        OptimizerError: if the step cannot be made functional.
    """
    names = {id(tensor): name for name, tensor in parameters.items()}
    functional = FunctionalOptimizer(group_of={})
    for index, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            name = names.get(id(tensor))
            if name is None:
                continue
            functional.group_of[name] = index
            key = (index, tuple(tensor.shape), tensor.dtype)
            if key not in functional.rules:
                functional.rules[key] = _trace_rule(optimizer, group, tensor)
    return functional


def _trace_rule(optimizer, group: dict[str, Any], like: torch.Tensor) -> UpdateRule:
    # Some optimizers avoid reading their step count on the host only when asked to be capturable.
    variants = [group, group | {"capturable": True}] if "capturable" in group else [group]
    numbers = tuple(group_numbers(group))
    first_error: Exception | None = None
    for variant in variants:
        try:
            return _trace_with_numbers(optimizer, variant, like, numbers)
        except Exception as error:  # a rule may fail in any way that torch's own code can
            first_error = first_error or error
        usable = tuple(name for name in numbers if _traces(optimizer, variant, like, name))
        with contextlib.suppress(Exception):
            return _trace_with_numbers(optimizer, variant, like, usable)
    raise OptimizerError(
        f"{type(optimizer).__name__}.step() cannot be made functional",
        why=f"{type(first_error).__name__}: {str(first_error)[:400]}",
        do="use a torch.optim optimizer whose step is arithmetic of dense tensors, or optimizer=None "
        "and step it yourself",
    ) from first_error


def _traces(optimizer, group, like, name: str) -> bool:
    try:
        _trace_with_numbers(optimizer, group, like, (name,))
    except Exception:
        return False
    return True


def _trace_with_numbers(
    optimizer, group: dict[str, Any], like: torch.Tensor, numbers: tuple[str, ...]
) -> UpdateRule:
    values = group_numbers(group)
    conditions: list[Condition] = []

    def run(parameter, gradient, states: dict, tensors) -> tuple[torch.Tensor, dict]:
        mode = _NumbersAsTensors(dict(zip(numbers, tensors, strict=True)), values)
        with mode, torch.no_grad(), torch_internals.pretending_to_compile():
            _step_one(optimizer, _group_with(group, parameter, mode.tensors), gradient, states)
        conditions.extend(c for c in mode.conditions if c not in conditions)
        return parameter, {k: v for k, v in states.items() if isinstance(v, torch.Tensor)}

    fake_mode = torch_internals.new_fake_mode()
    with fake_mode:
        stand_in = torch.empty(like.shape, dtype=like.dtype, device=torch_internals.host_device())
        gradient = torch.empty_like(stand_in)
        number_values = [torch.empty((), dtype=torch.float64) for _ in numbers]
    present = {
        key: value
        for key, value in optimizer.state.get(like, {}).items()
        if isinstance(value, torch.Tensor)
    }
    after_first: dict[str, torch.Tensor] = {}

    def first_step(parameter, gradient, *tensors):
        updated, states = run(parameter.clone(), gradient.clone(), {}, tensors)
        after_first.update(states)
        return [updated, *states.values()]

    has_first = True
    try:
        with fake_mode:  # which states there are; a graph of it is seldom needed
            first_step(stand_in, gradient, *number_values)
        fills = _starting_values(optimizer, group, like)
    except Exception:
        if not present:
            raise
        has_first, fills = False, {}  # only the constructor makes these (Adagrad)
    # Traced alike before and after states were loaded, so that a resumed run runs the same program.
    state_like = present or after_first
    specs = {
        key: StateSpec(tuple(value.shape), value.dtype, fills.get(key))
        for key, value in state_like.items()
    }
    with fake_mode:
        state_values = [
            torch.empty(spec.shape, dtype=spec.dtype, device=torch_internals.host_device())
            for spec in specs.values()
        ]

    def next_step(parameter, gradient, *rest):
        states = dict(zip(specs, (state.clone() for state in rest[: len(specs)]), strict=True))
        updated, states = run(parameter.clone(), gradient.clone(), states, rest[len(specs) :])
        return [updated, *(states[key] for key in specs)]

    examples = [stand_in, gradient, *state_values, *number_values]
    if has_first and any(spec.fill is None for spec in specs.values()):
        split = 2 + len(specs)
        with fake_mode:
            examples.insert(split, torch.empty(()))
        graph = _trace(_select_first(first_step, next_step, split), examples)
        specs[FIRST_STEP] = StateSpec((), torch.float32, 1.0)
    else:
        graph = _trace(next_step, examples)
    burnt = {name: value for name, value in values.items() if name not in numbers}
    rule = UpdateRule(graph, specs, numbers, tuple(conditions), burnt)
    return with_kernel(rule, optimizer, group)


def _step_one(optimizer, group: dict[str, Any], gradient: torch.Tensor, states: dict) -> None:
    """Runs torch's own step on the single parameter of ``group``; ``states`` is filled in place."""
    (parameter,) = group["params"]
    clone = copy.copy(optimizer)
    clone.__dict__ = dict(optimizer.__dict__)
    clone.param_groups = [group]
    clone.state = collections.defaultdict(dict, {parameter: states})
    parameter.grad = gradient
    step = type(optimizer).step
    # Past torch's wrapper, which calls the user's hooks: those belong to the real optimizer.
    getattr(step, "__wrapped__", step)(clone)


def _starting_values(optimizer, group: dict[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """What a fresh optimizer first sets each state to: a constant, or None if it is not constant.

    Seen by stepping a small real stand-in twice, from different parameters and gradients.
    """
    seen: list[dict[str, torch.Tensor]] = []
    for trial in (1.0, 2.0):
        small = torch.full((2,) * like.dim(), trial, dtype=like.dtype)
        states = _FirstValues()
        with torch.no_grad():
            alone = _group_with(group, small, {}) | {"capturable": False}
            _step_one(optimizer, alone, small.clone() * 0.5, states)
        seen.append(states.first)
    return {
        key: float(value.flatten()[0])
        if value.numel()
        and torch.equal(value, seen[1][key])
        and bool((value == value.flatten()[0]).all())
        else None
        for key, value in seen[0].items()
    }


class _FirstValues(dict):
    """A parameter's state dict that remembers the value each key was first set to."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, torch.Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and key not in self.first:
            self.first[key] = value.detach().clone()
        super().__setitem__(key, value)


def _select_first(first: Callable, later: Callable, split: int) -> Callable:
    """``first_step ? first(...) : later(...)``, element by element; ``split``: where the flag comes."""

    def step(*given):
        tensors, flag, numbers = given[:split], given[split], given[split + 1 :]
        before = first(*tensors[:2], *numbers)
        after = later(*tensors, *numbers)
        chosen = [torch.where(flag > 0, a, b) for a, b in zip(before, after, strict=True)]
        return [*chosen, torch.zeros_like(flag)]

    return step


def _trace(function, examples: list[torch.Tensor]) -> fx.GraphModule:
    functional = torch.func.functionalize(function, remove="mutations")
    graph = make_fx(functional, decomposition_table=MASKED_WRITES)(*examples)
    results = graph.graph.output_node().all_input_nodes
    for node in list(graph.graph.nodes):
        if copies_alike(node):
            node.replace_all_uses_with(node.args[1])
        elif node.target in IDENTITIES or (_is_clone(node) and node not in results):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    return graph


def _is_clone(node: fx.Node) -> bool:
    """Of a value that nobody writes, and that lies alike."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    return lie_alike(meta(node)["val"], meta(node.all_input_nodes[0])["val"])


class _NumbersAsTensors(TorchFunctionMode):
    """Lets torch.optim compute with tensors where it expects plain numbers."""

    def __init__(self, tensors: dict[str, torch.Tensor], values: dict[str, float]) -> None:
        super().__init__()
        self.tensors = tensors
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.values = values
        self.conditions: list[Condition] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _COMPARISONS and (known := self._known(name, args)) is not None:
            return known
        if name in ("item", "__float__") and isinstance(args[0], torch.Tensor):
            return args[0]
        for keyword in ("value", "alpha"):
            if isinstance(kwargs.get(keyword), torch.Tensor) and name.rstrip("_") in _SPELT_OUT:
                result = _SPELT_OUT[name.rstrip("_")](*args, kwargs[keyword])
                return args[0].copy_(result) if name.endswith("_") else result
        return func(*args, **kwargs)

    def _known(self, name: str, args) -> bool | None:
        number, other = args
        compare = _COMPARISONS[name]
        if isinstance(other, torch.Tensor) and not isinstance(number, torch.Tensor):
            number, other, compare = other, number, _MIRRORED.get(compare, compare)
        if id(number) not in self.names or not isinstance(other, (int, float)):
            return None
        label = self.names[id(number)]
        outcome = bool(compare(self.values[label], other))
        self.conditions.append(Condition(label, compare, float(other), outcome))
        return outcome


_COMPARISONS = {
    "__eq__": operator.eq, "__ne__": operator.ne, "__lt__": operator.lt, "__le__": operator.le,
    "__gt__": operator.gt, "__ge__": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_MIRRORED = {
    operator.lt: operator.gt, operator.gt: operator.lt,
    operator.le: operator.ge, operator.ge: operator.le,
}  # fmt: skip

# Operators whose `value=` / `alpha=` torch takes only as a number, written out with tensors.
_SPELT_OUT: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, alpha: x + _as_in(x, y) * alpha,
    "sub": lambda x, y, alpha: x - _as_in(x, y) * alpha,
    "addcmul": lambda x, a, b, value: x + value * _as_in(x, a) * b,
    "addcdiv": lambda x, a, b, value: x + value * (_as_in(x, a) / b),
}


def _as_in(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """In the type in which torch's kernel computes: a 0-dim number would not widen a bfloat16 tensor."""
    return y.to(torch.result_type(x, y))


def _group_with(group: dict[str, Any], leaf, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The parameter group over one parameter, numbers replaced by tensors."""
    replaced: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, (tuple, list)) and key != "params":
            items = [tensors.get(f"{key}.{i}", item) for i, item in enumerate(value)]
            replaced[key] = type(value)(items)
        else:
            replaced[key] = tensors.get(key, value)
    return (
        replaced
        | {"params": [leaf]}
        | {key: value for key, value in _IMPLEMENTATION.items() if key in group}
    )
