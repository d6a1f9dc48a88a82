"""Planner: one captured step, planned for as many meshes, placements and memory policies as asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stepgraph import torch_internals
from stepgraph.api.attempt import Attempt, attempt_of
from stepgraph.capture.module import BatchSpec, LossFunction
from stepgraph.capture.step import Captured, Source
from stepgraph.contest import Contest, Entrant, compete, rivals, taken
from stepgraph.cost.device import Device
from stepgraph.cost.predict import foretell
from stepgraph.errors import BatchError, BudgetError, MemoryPolicyError, UsageError, near_misses
from stepgraph.leading import leader
from stepgraph.lowering.graphs.obstacles import find_obstacles
from stepgraph.memory.decide import WEIGHED, WHOLE, candidates, decide
from stepgraph.memory.presets import NONE, budget_of
from stepgraph.memory.solver.frontiers import whole_step
from stepgraph.pipeline import apply, capture_of, foresee, make
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.placement.presets.named import check_preset
from stepgraph.placement.solver.held_bytes import Limits, whole_bytes
from stepgraph.placement.solver.room import Room
from stepgraph.planning.decisions import Table
from stepgraph.planning.fingerprint import fingerprint_of, type_of
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import AUTO, Request, StepSettings, is_searched
from stepgraph.planning.sizes import show_bytes
from stepgraph.planning.target import target_of
from stepgraph.program.driver import PassDriver, no_collections
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.runtime.batches import fake_leaves, flatten_batch
from stepgraph.torch_internals import pytree

MOST_SOLUTIONS = 5  # until the peak, which a solver knows in part, fits
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
STAGES = ("capture", "enumeration", "solve", "simulation")


@dataclass
class Planner:
    """Captures a step once; plans it.

    Args:
        model: on any device, the meta device included; it is not changed.
        example: a batch of the global shape, a pytree; real, fake or meta tensors.
        stage: called with the name of each stage of :data:`STAGES` as it begins.
        refused: memory policies that did not fit -> (bytes that a rank holds at least, on which mesh);
            planners of the same step with as many rows a rank may share it.
    """

    model: nn.Module
    example: Any
    loss: LossFunction
    optimizer: torch.optim.Optimizer | None
    device: Device
    settings: StepSettings
    stage: Callable[[str], None] = lambda name: None
    driver: PassDriver = field(default_factory=PassDriver)
    refused: dict[str, tuple[int, MeshShape]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._captured: Captured | None = None
        self._batch = host_batch(self.example, self.settings.micro_batches)
        self.target = target_of(self.device)

    def plan(
        self,
        mesh: MeshShape,
        placement: str,
        memory: str = AUTO,
        memory_budget: int | None = None,
        constraints: Mapping[str, str] | None = None,
        schedule: str = AUTO,
        last: bool = False,
        frontier: bool = False,
    ) -> Attempt:
        """One plan, with its prediction.

        Args:
            memory: a policy; ``budget:SIZE`` and ``auto`` search for what fits.
            memory_budget: bytes per rank; None: the device's capacity.
            last: the captured step is not needed again.
            frontier: the plan holds its memory-time frontier.

        Raises:
            BudgetError: a search found nothing that fits.
        """
        check_preset(placement, mesh)
        rows = next(t.shape[0] for t in self._batch.tensors if t.dim())
        if rows % mesh.data_size:
            raise BatchError(
                f"the example has {rows} rows a micro-batch, which do not divide over "
                f"{mesh.data_size} data-parallel ranks of the mesh {mesh}",
                do="give an example of the global shape: the rows of all ranks together",
            )
        named = zip(self._batch.paths, self._batch.leaves, strict=True)
        request = Request(
            placement,
            mesh,
            memory,
            schedule,
            step=self.settings,
            device=self.device.name,
            batch={path: type_of(leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)},
            memory_budget=budget_of(memory, memory_budget),
            constraints=dict(constraints or {}),
        )
        with no_collections():
            return self._plan(Plan(request, fingerprint=fingerprint_of(self.model)), last, frontier)

    def programs(self, plan: Plan, rank: int = 0) -> dict[str, Program]:
        """What a rank executes under a plan: scheduled and bound."""
        return apply(self.captured(plan.placement, plan.mesh).programs, plan, self.target, rank)

    def decided(self, plan: Plan, rank: int = 0) -> dict[str, Program]:
        """The same of a plan that need not have decided all of them."""
        return make(
            self.captured(plan.placement, plan.mesh).programs, plan, self.target, rank
        ).programs

    def captured(self, placement: str, mesh: MeshShape) -> Captured:
        """The global programs of the step, captured at the first call."""
        reduces = reduces_each_micro_batch(placement, mesh)
        if self._captured is None or self._captured.reduces_each != reduces:
            self.stage("capture")
            source = Source(
                self.model,
                self.loss,
                self._batch,
                self.optimizer,
                device_type=self.target.device_type,
                says_difference=True,
            )
            self._captured = capture_of(source, self.settings, self.driver).step(reduces)
            self._captured.reduces_each = reduces
        return self._captured

    def whole_bytes(self, mesh: MeshShape, memory: str) -> tuple[int, int]:
        """Bytes that all ranks hold together at least: of parameters and states, and for the backward.

        Under the memory policy that keeps least of those that one stands for.
        """
        step = self.captured(AUTO, mesh).programs["step"]
        found = []
        for policy in candidates(memory):
            with contextlib.suppress(MemoryPolicyError):
                found.append(whole_bytes(step, decide(step, policy).recompute))
        return min(found, default=(0, 0))

    def _plan(self, first: Plan, last: bool, frontier: bool) -> Attempt:
        captured = self.captured(first.placement, first.mesh)
        self.stage("enumeration")
        if is_searched(first.memory):
            best = self._search(first, captured.programs, last, frontier)
        else:
            best = self._fit(first, captured.programs, last, last and not frontier)
        self.stage("simulation")
        points, frontiers = None, best.made.frontiers
        if frontier and not frontiers:
            made = make(captured.programs, best.plan, self.target, with_frontier=True)
            frontiers = made.frontiers
        if frontier:
            points = whole_step(frontiers, self.settings.micro_batches)
        plan, programs = best.plan, best.made.programs
        obstacles = None
        if self.target.graphs:
            every = (o for p in programs.values() for o in find_obstacles(p, self.target))
            obstacles = tuple(dict.fromkeys(map(str, every)))
        gaps = [decided.placement.optimality_gap for decided in plan.decisions.values()]
        gap = max((gap for gap in gaps if gap is not None), default=None)
        notes = [
            *captured.notes,
            *captured.remarks,
            *plan.notes,
            *(d.memory.reason for d in plan.decisions.values() if d.memory and d.memory.reason),
            *(n for p in programs.values() for n in p.notes),
        ]
        best.plan = replace(
            plan,
            predicted=best.predicted.with_gap(gap),
            values={key: Table(facts) for key, facts in best.made.facts.items()},
            notes=tuple(dict.fromkeys(notes)),
            points=points,
            graph_obstacles=obstacles,
            final=True,
        )
        return best

    def _search(
        self, first: Plan, programs: Mapping[str, Program], last: bool, frontier: bool
    ) -> Attempt:
        """What fits and takes least time; where placements are searched for, what is kept on those.

        They are searched for as if nothing, and then as if every block, were recomputed.
        """
        if not first.request.searches:
            return self._kept(first, programs, frontier)
        placed = self._fit(first, programs, last, once=False)
        if placed.fits and placed.plan.memory == NONE:
            return placed
        found = self._kept(placed.plan.under(memory=first.memory), programs, frontier)
        found.plan = replace(found.plan, notes=placed.plan.notes)
        return found

    def _kept(self, plan: Plan, programs: Mapping[str, Program], frontier: bool) -> Attempt:
        """What is best kept where a plan's placements are decided, or follow from a preset."""
        self.stage("solve")
        made = make(
            programs, plan, self.target,
            driver=self.driver, with_facts=True, with_frontier=frontier,
        )  # fmt: skip
        steps = self.settings.micro_batches
        if made.trials.keys() == made.programs.keys():
            predicted = foretell(made.trials, self.device, steps)
        else:
            predicted = foresee(made.programs, self.device, made.plan.lowering, steps)
        return attempt_of(made, plan.request.memory_budget or self.device.capacity, predicted)

    def _fit(self, first: Plan, programs: Mapping[str, Program], last: bool, once: bool) -> Attempt:
        """The first memory policy whose peak fits, or the one with the smallest peak.

        Args:
            last: no other mesh follows.
            once: the programs are not needed again.
        """
        policies, asked = candidates(first.memory), first.memory
        once = once and len(policies) == 1 and not first.request.memory_budget
        budget = first.request.memory_budget or self.device.capacity
        best: Attempt | None = None
        tried: list[str] = []
        for policy in policies:
            given_up = policy != policies[-1]
            if given_up and self._holds(policy, first.mesh) > budget:
                tried.append(f"{policy} did not fit a like mesh")
                continue
            try:
                asked_of = first.under(memory=policy), programs, budget
                lean = is_searched(asked) and not given_up and first.request.searches
                logits = WHOLE if is_searched(asked) else WEIGHED
                room = Room(says_least=not (given_up and last))  # other meshes ask for it
                attempt = self._try(*asked_of, once, given_up, lean, logits, room)
            except (MemoryPolicyError, BudgetError) as error:
                if not is_searched(asked) or (best is None and policy == policies[-1]):
                    raise
                tried.append(f"{policy} is not possible here ({error.what})")
                least = error.least if isinstance(error, BudgetError) else 0
                if least and first.request.searches:
                    self.refused[policy] = least, first.mesh
                continue
            tried.append(f"{policy} peaks at {show_bytes(attempt.peak)}")
            if best is None or attempt.peak < best.peak:
                best = attempt
            if attempt.fits:
                break
        assert best is not None
        notes = []
        if is_searched(asked):
            under = f"placements are those found under {best.plan.memory}"
            notes = [f"memory {asked}: {under}, of {show_bytes(budget)} ({'; '.join(tried)})"]
        elif not best.fits:
            peak, of = show_bytes(best.peak), show_bytes(budget)
            notes = [f"it does not fit: the peak is {peak}, of {of}"]
        best.plan = replace(best.plan, notes=(*best.plan.notes, *notes))
        return best

    def _holds(self, policy: str, mesh: MeshShape) -> float:
        """Bytes that a rank holds at least, from another mesh of as many ranks; 0: not known."""
        least, other = self.refused.get(policy, (0, mesh))
        alike = other.world_size == mesh.world_size
        return alike * least * min(1.0, mesh.data_size / other.data_size)

    def _try(
        self,
        plan: Plan,
        programs: Mapping[str, Program],
        budget: int,
        once: bool,
        given_up: bool,
        only_placed: bool,
        logits: str,
        room: Room,
    ) -> Attempt:
        """One memory policy; a solver is given less room until what it does not count fits as well.

        Args:
            once: of :meth:`_fit`.
            given_up: as soon as it is seen that it does not fit: there is another policy.
            only_placed: placements are all that is asked for: nothing whole is made where that can be.
            logits, room: how they are; what a solver may hold at first.
        """
        limits = Limits(budget)
        contest = Contest(programs, plan, self.target, self.device, logits=logits)
        best: Attempt | None = None
        too_small: BudgetError | None = None
        for _ in range(MOST_SOLUTIONS):
            self.stage("solve")
            try:
                where = plan
                if only_placed:
                    where, leads = leader(contest, room)
                    found = leads and attempt_of(leads.made, budget, leads.predicted)
                    less = found and copy(limits).after(_held(where), found.peak)
                    if found and (found.fits or (less is None and best is None)):
                        return found
                keep = not once or plan.request.searches
                made = make(
                    programs, where, self.target,
                    driver=self.driver, room=room, with_facts=True, keep=keep, logits=logits,
                )  # fmt: skip
            except BudgetError as error:
                if given_up:
                    raise
                too_small = error
                if limit := limits.raised_to(error.least or 0):
                    room = replace(room, limit=limit)
                    continue
                if best is None:
                    raise
                break
            steps = self.settings.micro_batches
            predicted = foresee(made.programs, self.device, plan.lowering, steps)
            attempt = attempt_of(made, budget, predicted)
            if best is None or attempt.fits or not best.fits:
                best = attempt
            held = _held(made.plan)
            limit = limits.after(held, attempt.peak) if plan.request.searches else None
            if limit is None:
                break
            room = replace(room, limit=limit)
        if best is None:
            assert too_small is not None
            raise too_small
        return self._best_of(best, contest, budget)

    def _best_of(self, own: Attempt, contest: Contest, budget: int) -> Attempt:
        """A solver's answer, or that of a preset which is simulated beside it."""
        names = rivals(contest.programs, contest.plan)
        if not names:
            return own
        self.stage("simulation")
        solved = Entrant(AUTO, own.made, own.predicted)
        best = taken(compete(solved, names, contest), budget)
        if best is solved:
            return replace(own, plan=best.made.plan)
        return attempt_of(best.made, budget, best.predicted)


def _held(plan: Plan) -> float:
    """Bytes that a rank holds, as a solver counts them."""
    return max(decided.placement.held_bytes for decided in plan.decisions.values())


def host_batch(example: Any, micro_batches: int = 1) -> BatchSpec:
    """The batch of one micro-batch as fake tensors on the host, whatever the example is made of.

    Raises:
        BatchError: no tensor in it, tensors that differ in dimension 0, or rows that do not divide.
    """
    host = torch_internals.host_device()

    def rows(count: int) -> int:
        if count % micro_batches:
            raise BatchError(
                f"the example has {count} rows, which do not divide into {micro_batches} micro-batches",
                do="give an example whose rows are a multiple of micro_batches",
            )
        return count // micro_batches

    return flatten_batch(pytree.tree_map(fake_leaves(rows), example), host)


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
