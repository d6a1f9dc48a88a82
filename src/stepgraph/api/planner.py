"""Planner: one captured step, planned for as many meshes, placements and memory policies as asked."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.capture.module import BatchSpec, LossFunction
from stepgraph.capture.precision import Precision
from stepgraph.cost.devices import Device
from stepgraph.cost.memory import CATEGORIES, memory_timeline
from stepgraph.cost.predict import predict
from stepgraph.cost.traffic import assign_traffic
from stepgraph.errors import BatchError, BudgetError, MemoryPolicyError, UsageError, near_misses
from stepgraph.pipeline import (
    StepPrograms,
    StepRequest,
    apply_memory,
    apply_placement,
    capture_step,
    in_order,
    spell_out,
)
from stepgraph.placement.presets.named import check_preset
from stepgraph.placement.solver.held_bytes import Limits
from stepgraph.planning.facts import gather_facts
from stepgraph.planning.fingerprint import fingerprint_of, type_of
from stepgraph.planning.plan import AUTO, Plan
from stepgraph.planning.settings import Settings
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.report.text import show_bytes
from stepgraph.runtime.batches import flatten_batch
from stepgraph.torch_internals import pytree

MOST_SOLUTIONS = 5  # until the peak, which a solver knows in part, fits
MEMORY_CANDIDATES = ("none", "layers:2", "full")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
STAGES = ("capture", "enumeration", "solve", "simulation")


@dataclass
class Attempt:
    """A plan, and whether it fits: ``largest`` is the category with most bytes at the peak."""

    plan: Plan
    peak: int
    budget: int
    largest: tuple[str, int]

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget."""
        return self.peak <= self.budget

    def error(self) -> BudgetError:
        """Says how much is missing, and what takes the most."""
        name, size = self.largest
        plan = self.plan
        return BudgetError(
            f"no plan fits {show_bytes(self.budget)} a rank: the smallest peak is {show_bytes(self.peak)}",
            where=f"{plan.placement} on mesh {plan.mesh}, memory {plan.memory}",
            why=f"at the peak, {name} take {show_bytes(size)}",
            do=f"give at least {show_bytes(self.peak)}, more ranks, or fewer rows a rank; or {_HELP[name]}",
        )


_HELP = {
    "parameters": "shard them: zero3, or tensor parallelism",
    "gradients": "shard them: zero2, zero3, or tensor parallelism",
    "optimizer": "shard it: zero1, zero2 or zero3",
    "inputs": "pass smaller batches",
    "activations": "recompute more of them (memory='full'), or add tensor parallelism",
    "temporaries": "add tensor parallelism: it cuts the largest products",
    "communication": "gather less at once: a placement that keeps parameters whole",
}


@dataclass
class Planner:
    """Captures a step once; plans it.

    Args:
        model: on any device, the meta device included; it is not changed.
        example: a batch of the global shape, a pytree; real, fake or meta tensors.
        loss: ``(model, batch) -> scalar``.
        optimizer: one over the model's parameters, or None.
        device: a model of what the step would run on.
        precision: of the program.
        micro_batches: the example is cut into so many.
        clip: by the global norm of gradients.
        stage: called with the name of each stage of :data:`STAGES` as it begins.
    """

    model: nn.Module
    example: Any
    loss: LossFunction
    optimizer: torch.optim.Optimizer | None
    device: Device
    precision: Precision
    micro_batches: int = 1
    clip: bool = False
    stage: Callable[[str], None] = lambda name: None
    driver: PassDriver = field(default_factory=PassDriver)

    def __post_init__(self) -> None:
        self._captured: StepPrograms | None = None
        self._batch = host_batch(self.example, self.micro_batches)
        self._fingerprint = fingerprint_of(self.model)

    def plan(
        self,
        mesh: MeshShape,
        placement: str,
        memory: str = AUTO,
        memory_budget: int | None = None,
        constraints: Mapping[str, str] | None = None,
        *,
        last: bool = True,
    ) -> Attempt:
        """One plan, with its prediction.

        Args:
            placement: a preset or ``auto``.
            memory: a policy, or ``auto``: the first of :data:`MEMORY_CANDIDATES` that fits.
            memory_budget: bytes per rank; None: the device's capacity.
            constraints: for ``auto``.
            last: the captured step is not needed again, and may be rewritten.
        """
        check_preset(placement, mesh)
        self._check_rows(mesh)
        with _no_collections():
            return self._plan(mesh, placement, memory, memory_budget, constraints, last)

    def _plan(
        self,
        mesh: MeshShape,
        placement: str,
        memory: str,
        memory_budget: int | None,
        constraints: Mapping[str, str] | None,
        last: bool,
    ) -> Attempt:
        settings = self._settings(memory_budget, constraints)
        captured = self._capture(placement, mesh)
        self.stage("enumeration")
        programs = {
            name: spell_out(program if last else program.copy(), mesh, self.driver, placement)
            for name, program in captured.programs.items()
        }
        for program in programs.values():
            assign_traffic(program, fused=True)
        budget = memory_budget or self.device.capacity
        first = Plan(placement, mesh, settings=settings, fingerprint=self._fingerprint)
        best, placed = self._fit(first, programs, memory, budget)
        plan = best.plan
        self.stage("simulation")
        gaps = [decision.optimality_gap for decision in plan.placements.values()]
        gap = max((gap for gap in gaps if gap is not None), default=None)
        plan.predicted = predict(placed, self.device, self.micro_batches).with_gap(gap)
        for key, program in programs.items():
            plan.values[key] = gather_facts(program, placed[key], plan.placements[key])
        notes = [*captured.notes, *plan.notes]
        for program in placed.values():
            notes += program.notes
        plan.notes = list(dict.fromkeys(notes))
        plan.final = True
        return best

    def _settings(self, budget: int | None, constraints: Mapping[str, str] | None) -> Settings:
        compute = self.precision.compute
        return Settings(
            device=self.device.name,
            batch={
                path: type_of(leaf)
                for path, leaf in zip(self._batch.paths, self._batch.leaves, strict=True)
                if isinstance(leaf, torch.Tensor)
            },
            compute_dtype=None if compute is None else str(compute).removeprefix("torch."),
            optimizer=None if self.optimizer is None else type(self.optimizer).__name__.lower(),
            memory_budget=budget,
            constraints=dict(constraints or {}),
            micro_batches=self.micro_batches,
            clip=self.clip,
        )

    def _check_rows(self, mesh: MeshShape) -> None:
        rows = next(t.shape[0] for t in self._batch.tensors if t.dim())
        if rows % mesh.data_size:
            raise BatchError(
                f"the example has {rows} rows a micro-batch, which do not divide over "
                f"{mesh.data_size} data-parallel ranks of the mesh {mesh}",
                do="give an example of the global shape: the rows of all ranks together",
            )

    def _capture(self, placement: str, mesh: MeshShape) -> StepPrograms:
        if self._captured is None:
            self.stage("capture")
            request = StepRequest(
                self.model,
                self.loss,
                self._batch,
                Plan(placement, mesh),
                self.optimizer,
                self.micro_batches,
                self.clip,
                self.precision,
            )
            self._captured = capture_step(request, self.driver)
        return self._captured

    def _fit(
        self, first: Plan, programs: dict[str, Program], memory: str, budget: int
    ) -> tuple[Attempt, dict[str, Program]]:
        """The first memory policy whose peak fits, or the one with the smallest peak."""
        policies = MEMORY_CANDIDATES if memory == AUTO else (memory,)
        best: Attempt | None = None
        tried: list[str] = []
        placed: dict[str, tuple[Program, str]] = {}
        result: dict[str, Program] = {}
        for policy in policies:
            plan = replace(first, memory=policy, recomputation={}, notes=[])
            only = policy == policies[-1] or plan.placement == AUTO  # which places anew
            try:
                attempt, done = self._try(plan, programs, budget, placed, only)
            except (MemoryPolicyError, BudgetError) as error:
                if memory != AUTO or (best is None and policy == policies[-1]):
                    raise
                tried.append(f"{policy} is not possible here ({error.what})")
                continue
            first.placements = attempt.plan.placements
            tried.append(f"{policy} peaks at {show_bytes(attempt.peak)}")
            if best is None or attempt.peak < best.peak:
                best, result = attempt, done
            if attempt.fits:
                break
        assert best is not None
        if memory == AUTO:
            found = f"{best.plan.memory} is the first that fits" if best.fits else "nothing fits"
            best.plan.notes.append(
                f"memory auto: {found} {show_bytes(budget)} ({'; '.join(tried)})"
            )
        elif not best.fits:
            best.plan.notes.append(
                f"it does not fit: the peak is {show_bytes(best.peak)}, of {show_bytes(budget)}"
            )
        return best, result

    def _try(
        self,
        plan: Plan,
        programs: dict[str, Program],
        budget: int,
        placed: dict[str, tuple[Program, str]],
        only: bool,
    ) -> tuple[Attempt, dict[str, Program]]:
        """One memory policy; a solver is given less room until what it does not count fits as well.

        Args:
            placed: programs as they were placed for another policy, which a preset does not change.
            only: the placed programs are not needed again.
        """
        limits, limit = Limits(budget), None
        best: tuple[Attempt, dict[str, Program]] | None = None
        for _ in range(MOST_SOLUTIONS):
            if not placed or plan.placement == AUTO:
                plan = replace(plan, placements={}, recomputation={})
                self.stage("solve")
                try:
                    placed |= {
                        name: apply_placement(program, plan, self.driver, self.micro_batches, limit)
                        for name, program in in_order(programs)
                    }
                except BudgetError as error:
                    limit = limits.raised_to(error.least or 0)
                    if limit is not None:
                        continue
                    if best is None:
                        raise
                    break
            done = {
                name: apply_memory(program if only else program.copy(), plan, key, self.driver)
                for name, (program, key) in placed.items()
            }
            attempt = _attempt(plan, done, budget)
            if best is None or attempt.fits or not best[0].fits:
                best = attempt, done
            held = max(decision.held_bytes for decision in plan.placements.values())
            limit = limits.after(held, attempt.peak) if plan.placement == AUTO else None
            if limit is None:
                break
        assert best is not None
        return best


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """No search for garbage in a heap of a million nodes that all live on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _attempt(plan: Plan, programs: Mapping[str, Program], budget: int) -> Attempt:
    peak, largest = -1, ("", 0)
    for program in programs.values():
        timeline = memory_timeline(program)
        totals = [sum(alive.values()) for alive in timeline.at]
        at = max(range(len(totals)), key=totals.__getitem__)
        if totals[at] > peak:
            alive = timeline.at[at]
            name = max(CATEGORIES, key=lambda c: alive.get(c, 0))
            peak, largest = totals[at], (name, alive[name])
    return Attempt(plan, peak, budget, largest)


def host_batch(example: Any, micro_batches: int = 1) -> BatchSpec:
    """The batch of one micro-batch as fake tensors on the host, whatever the example is made of.

    Raises:
        BatchError: no tensor in it, tensors that differ in dimension 0, or rows that do not divide.
    """
    mode = torch_internals.new_fake_mode()
    host = torch_internals.host_device()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] % micro_batches:
            raise BatchError(
                f"the example has {shape[0]} rows, which do not divide into {micro_batches} "
                "micro-batches",
                do="give an example whose rows are a multiple of micro_batches",
            )
        if shape:
            shape[0] //= micro_batches
        with mode:
            return torch.empty(shape, dtype=leaf.dtype, device=host)

    local = flatten_batch(pytree.tree_map(fake, example), host)
    return BatchSpec(local.leaves, local.paths, local.tree)


def make_optimizer(
    optimizer: str | torch.optim.Optimizer | None, model: nn.Module
) -> torch.optim.Optimizer | None:
    """The optimizer of a name, over all of a model's parameters.

    Raises:
        UsageError: an unknown name; the message lists the known ones.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"unknown optimizer {optimizer!r}", do=near_misses(str(optimizer), OPTIMIZERS)
        )
    return OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
