"""Trains on a mesh that is not there: all ranks in one process, in lockstep.

What an Engine does on real ranks, step after step, for tests and for looking at a plan's numbers on a
laptop. Slow (every rank's arithmetic runs here), and exact: the programs are those of the real run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.capture.module import BatchSpec, LossFunction, default_loss
from stepgraph.capture.optimizer import group_numbers
from stepgraph.capture.outside_tensors import outside_tensors
from stepgraph.capture.step import Captured, Source
from stepgraph.capture.update import MAX_GRAD_NORM
from stepgraph.capture.update_rules import FIRST_STEP
from stepgraph.equivalence.lockstep import run_lockstep
from stepgraph.errors import BatchError
from stepgraph.pipeline import ALL_RANKS, Made, capture_of, make
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.planning.request import AS_IT_IS, Precision, StepSettings
from stepgraph.planning.target import usual_target
from stepgraph.program import roles
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program, Value
from stepgraph.program.randomness import seed_words
from stepgraph.program.shards import join, split
from stepgraph.runtime.batches import (
    LocalBatch,
    flatten_batch,
    global_spec,
    in_turn,
    split_micro_batches,
)
from stepgraph.runtime.ranks import parse_mesh


class OneProcessRun:
    """A training run on all ranks of a mesh, in this process.

    Args:
        model: a plain module with real parameters; it is copied from, never changed.
        optimizer: over the model's parameters; its numbers are read at every step.
        mesh: such as ``"dp=4"``.
        plan: a preset's name or a Plan.
        memory: a memory policy; None: the plan's own.
        driver: of the passes; by default one that checks every invariant after each pass.
        captured: the ``captured`` of a run that differs in nothing but ``mesh``, ``plan`` and
            ``memory``: the step is not captured again.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        mesh: str = "dp=1",
        plan: str | Plan = "zero3",
        memory: str | None = None,
        micro_batches: int = 1,
        max_grad_norm: float | None = None,
        seed: int = 0,
        precision: Precision = AS_IT_IS,
        driver: PassDriver | None = None,
        captured: Captured | None = None,
    ) -> None:
        self.mesh = parse_mesh(mesh)
        made = preset_plan(plan, self.mesh) if isinstance(plan, str) else plan
        step = StepSettings(
            None if optimizer is None else type(optimizer).__name__.lower(),
            micro_batches,
            max_grad_norm is not None,
            precision,
            seed,
        )
        self.plan = made.under(memory=memory or made.memory, step=step)
        self.model, self.loss, self.optimizer = model, loss or default_loss, optimizer
        self.max_grad_norm = max_grad_norm
        self.driver = driver or PassDriver(invariants=True)
        self.steps = 0
        self.captured = captured
        self.made: Made | None = None
        self._state: dict[roles.Input, list[torch.Tensor]] = {}
        self._values: dict[roles.Input, Value] = {}

    @property
    def programs(self) -> dict[str, Program]:
        """The programs, once the first step has compiled them."""
        return self.made.programs if self.made else {}

    def step(self, batch: Any) -> torch.Tensor:
        """One step on the *global* batch.

        Returns:
            the loss.
        """
        device = next(self.model.parameters()).device
        pieces = self._pieces(flatten_batch(batch, device))
        if self.made is None:
            self._compile(pieces[0])
        self._set_numbers()
        for role, parts in self._state.items():
            if isinstance(role, roles.Accumulator):
                self._state[role] = [torch.zeros_like(part) for part in parts]
        results: dict[roles.Output, list[torch.Tensor]] = {}
        for name, number, piece in in_turn(pieces):
            words = seed_words(self.plan.request.step.seed, self.steps, number)
            self._state[roles.Seed()] = [words] * self.mesh.world_size
            results = self._run(self.programs[name], piece)
        self.steps += 1
        if self.optimizer is not None:
            torch_internals.mark_stepped(self.optimizer)
        return results[roles.Loss()][0]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that the programs update, as global tensors."""
        return self._whole(roles.Param)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the programs read or write, as global tensors."""
        return self._whole(roles.Buffer)

    def _whole(self, kind: type[roles.Param] | type[roles.Buffer]) -> dict[str, torch.Tensor]:
        return {
            role.name: join(parts, value.shape, value.placements or (), self.mesh)
            for role, parts in self._state.items()
            if isinstance(role, kind) and (value := self._values[role])
        }

    def _pieces(self, batch: LocalBatch) -> list[LocalBatch]:
        """Micro-batch i: the i-th slice of every rank's part, in rank order."""
        ranks = self.mesh.data_size
        tensors = [leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if tensors[0].shape[0] % ranks:
            raise BatchError(f"{tensors[0].shape[0]} rows do not divide over {ranks} ranks")
        per_rank = []
        for rank in range(ranks):
            part = [
                leaf.chunk(ranks)[rank] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
                for leaf in batch.leaves
            ]
            local = LocalBatch(tuple(part), batch.paths, batch.tree, ())
            per_rank.append(split_micro_batches(local, self.plan.request.step.micro_batches))
        return [
            LocalBatch(
                tuple(
                    torch.cat([per_rank[r][i][j] for r in range(ranks)])
                    if isinstance(leaf, torch.Tensor) and leaf.dim()
                    else leaf
                    for j, leaf in enumerate(batch.leaves)
                ),
                batch.paths,
                batch.tree,
                (),
            )
            for i in range(self.plan.request.step.micro_batches)
        ]

    def _compile(self, piece: LocalBatch) -> None:
        spec: BatchSpec = global_spec(piece, 1, 1)
        source = Source(self.model, self.loss, spec, self.optimizer)
        if self.captured is None:
            reduces = reduces_each_micro_batch(self.plan.placement, self.mesh)
            self.captured = capture_of(source, self.plan.request.step, self.driver).step(reduces)
        target = usual_target(next(self.model.parameters()).device.type)
        self.made = make(self.captured.programs, self.plan, target, ALL_RANKS, driver=self.driver)
        self.plan = self.made.plan
        tensors: dict[roles.Input, torch.Tensor] = {
            roles.Param(name): p.detach() for name, p in self.model.named_parameters()
        }
        tensors |= {roles.Buffer(name): b for name, b in self.model.named_buffers()}
        outside = outside_tensors(source.loss, self.model)
        tensors |= {roles.Outside(one.name): one.found.detach() for one in outside}
        for program in self.programs.values():
            for role, value in zip(program.inputs, program.input_values, strict=True):
                if isinstance(role, (roles.UserInput, roles.Seed)) or role in self._state:
                    continue
                tensor = tensors.get(role, self._held(role))
                if tensor is None:
                    tensor = torch.full(value.shape, self._start(role), dtype=value.dtype)
                self._state[role] = split(tensor, value.placements or (), self.mesh)
                self._values[role] = value

    def _held(self, role: roles.Input) -> torch.Tensor | None:
        """An optimizer state that exists already (Adagrad makes its own at once)."""
        if not isinstance(role, roles.OptimizerState) or self.optimizer is None:
            return None
        assert self.captured is not None
        name = self.captured.counters.members(role.owner)[0]
        held = self.optimizer.state.get(self.model.get_parameter(name), {})
        if role.key == FIRST_STEP and any(isinstance(v, torch.Tensor) for v in held.values()):
            return torch.zeros(())
        return held.get(role.key)

    def _start(self, role: roles.Input) -> float:
        if not isinstance(role, roles.OptimizerState):
            return 0.0
        assert self.captured is not None and self.captured.optimizer is not None
        name = self.captured.counters.members(role.owner)[0]
        rule = self.captured.optimizer.rule(name, self.model.get_parameter(name))
        return rule.states[role.key].fill or 0.0

    def _set_numbers(self) -> None:
        numbers = {MAX_GRAD_NORM: self.max_grad_norm or 0.0}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        for index, group in enumerate(groups):
            numbers |= {f"group{index}.{k}": v for k, v in group_numbers(group).items()}
        for role, parts in self._state.items():
            if isinstance(role, roles.Scalar):
                for part in parts:
                    part.fill_(numbers[role.name])

    def _run(self, program: Program, piece: LocalBatch) -> dict[roles.Output, list[torch.Tensor]]:
        columns = []
        for role, value in zip(program.inputs, program.input_values, strict=True):
            if isinstance(role, roles.UserInput):
                leaf = piece.leaves[role.index]
                columns.append(split(leaf, value.placements or (), self.mesh))
            else:
                columns.append(self._state[role])
        rows = run_lockstep(program, list(zip(*columns, strict=True)))
        results: dict[roles.Output, list[torch.Tensor]] = {}
        for index, role in enumerate(program.outputs):
            results[role] = [row[index] for row in rows]
            written = roles.written_input(role)
            if written is not None:
                self._state[written] = results[role]
        return results
