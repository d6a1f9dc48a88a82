"""Global values to run programs on, and running them: cut for every rank, joined again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.capture.optimizer import FIRST_STEP, group_numbers
from stepgraph.capture.update import MAX_GRAD_NORM
from stepgraph.equivalence.lockstep import Observer, run_lockstep
from stepgraph.pipeline import StepRequest
from stepgraph.program import roles
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program, Value
from stepgraph.program.randomness import seed_words
from stepgraph.program.shards import join, split


class GlobalValues:
    """A global tensor for every input that a Program of this step may have.

    Parameters and buffers are the model's own, the batch is ``leaves``; optimizer states are made up
    (small random values, a step count of 3), so that a program that ignores one is found out.
    """

    def __init__(
        self, request: StepRequest, leaves: list[Any], max_grad_norm: float | None, seed: int
    ) -> None:
        model = request.model
        self.tensors: dict[roles.Input, torch.Tensor] = {
            roles.Param(name): _whole(p.detach()) for name, p in model.named_parameters()
        }
        self.tensors |= {roles.Buffer(name): b for name, b in model.named_buffers()}
        self.request, self.leaves, self.max_grad_norm = request, leaves, max_grad_norm
        self.micro_batch = request.micro_batches - 1  # the leaves are the last one's
        self.random = torch.Generator().manual_seed(seed)

    def of(self, role: roles.Input, value: Value) -> torch.Tensor:
        """The global tensor of one input."""
        if isinstance(role, roles.UserInput):
            return self.leaves[role.index]
        if role not in self.tensors:
            self.tensors[role] = self._make(role, value)
        return self.tensors[role].to(value.dtype)

    def _make(self, role: roles.Input, value: Value) -> torch.Tensor:
        match role:
            case roles.Tangent():
                return torch.ones((), dtype=value.dtype)
            case roles.Seed():
                return seed_words(0, 3, self.micro_batch)
            case roles.Scalar(name) if name == MAX_GRAD_NORM:
                return torch.tensor(self.max_grad_norm, dtype=value.dtype)
            case roles.Scalar(name):
                group, _, number = name.partition(".")
                assert self.request.optimizer is not None
                numbers = group_numbers(self.request.optimizer.param_groups[int(group[5:])])
                return torch.tensor(numbers[number], dtype=value.dtype)
            case roles.OptimizerState(_, key) if key == FIRST_STEP:
                return torch.zeros((), dtype=value.dtype)
            case roles.OptimizerState() if not value.shape:
                return torch.full((), 3.0, dtype=value.dtype)
            case roles.Accumulator(name) if name.startswith("total:"):
                return torch.full(value.shape, 7, dtype=value.dtype)
        made = torch.rand(value.shape, generator=self.random, dtype=torch.float32)
        return (made * 1e-3).to(value.dtype)  # about the size of gradients

    def clear_accumulators(self) -> None:
        """Starts a new accumulation."""
        for role, tensor in self.tensors.items():
            if isinstance(role, roles.Accumulator):
                self.tensors[role] = torch.zeros_like(tensor)

    def execute(
        self,
        programs: Program | Sequence[Program],
        *,
        in_place: bool = False,
        observe: Observer | None = None,
    ) -> dict[Any, torch.Tensor]:
        """All global results of a Program (or of every rank's own).

        Args:
            in_place: the programs write their state; count what was written as results.
        """
        first = programs if isinstance(programs, Program) else programs[0]
        mesh = first.mesh or MeshShape((("dp", 1),))
        rows = list(zip(first.inputs, first.input_values, strict=True))
        local = [self._cut(self.of(role, value), value, mesh) for role, value in rows]
        results = run_lockstep(programs, list(zip(*local, strict=True)), observe)
        found: dict[Any, torch.Tensor] = {}
        for index, (role, value) in enumerate(zip(first.outputs, first.output_values, strict=True)):
            found[role] = _join([result[index] for result in results], value, mesh)
        if in_place:
            for (role, value), parts in zip(rows, local, strict=True):
                for output in _replacing(role):
                    found[output] = _join(parts, value, mesh)
        return found

    def _cut(self, tensor: torch.Tensor, value: Value, mesh: MeshShape) -> list[torch.Tensor]:
        if value.placements is None:
            return [tensor.clone() for _ in range(mesh.world_size)]
        return split(tensor, value.placements, mesh)

    def step_optimizer(self, results: dict[Any, torch.Tensor], program: Program) -> dict[Any, Any]:
        """New parameters and states after one step of the user's own optimizer class.

        Args:
            results: holds the gradients.
            program: has the optimizer states as inputs.
        """
        optimizer = self.request.optimizer
        assert optimizer is not None
        names = {id(p): name for name, p in self.request.model.named_parameters()}
        states: dict[str, dict[str, torch.Tensor]] = {}
        for role, value in zip(program.inputs, program.input_values, strict=True):
            if isinstance(role, roles.OptimizerState):
                states.setdefault(role.owner, {})[role.key] = self.of(role, value)
        clone = copy.copy(optimizer)
        clone.__dict__ = dict(optimizer.__dict__)
        clone.param_groups = [dict(group) for group in optimizer.param_groups]
        clone.state = type(optimizer.state)(dict)
        owner_of: dict[str, torch.Tensor] = {}
        for index, group in enumerate(clone.param_groups):
            named = [names[id(p)] for p in group["params"]]
            group["params"] = [self.tensors[roles.Param(name)].clone() for name in named]
            for name, leaf in zip(named, group["params"], strict=True):
                leaf.grad = results.get(roles.Grad(name))
                owner_of[name] = leaf
                held = {**states.get(f"group{index}", {}), **states.get(name, {})}
                held.pop(FIRST_STEP, None)
                if held and leaf.grad is not None:
                    clone.state[leaf] = {key: tensor.clone() for key, tensor in held.items()}
                owner_of.setdefault(f"group{index}", leaf)
        step = type(optimizer).step
        getattr(step, "__wrapped__", step)(clone)
        expected: dict[Any, Any] = {}
        for output in program.outputs:
            if isinstance(output, roles.NewParam):
                expected[output] = owner_of[output.name]
            elif isinstance(output, roles.NewOptimizerState):
                state = clone.state[owner_of[output.owner]]
                if output.key in state:
                    expected[output] = state[output.key]
        return expected


def _join(parts: Sequence[torch.Tensor], value: Value, mesh: MeshShape) -> torch.Tensor:
    if value.placements is None:
        return parts[0]
    return join(parts, value.shape, value.placements, mesh)


def _replacing(role: roles.Input) -> list[roles.Output]:
    """The output whose value an input's storage holds after an in-place program."""
    match role:
        case roles.Param(name):
            return [roles.NewParam(name)]
        case roles.Buffer(name):
            return [roles.NewBuffer(name)]
        case roles.OptimizerState(owner, key):
            return [roles.NewOptimizerState(owner, key)]
        case roles.Accumulator(name):
            return [roles.NewAccumulator(name)]
    return []


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
