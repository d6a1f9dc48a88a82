"""Planning again in the middle of a run: steps are measured, the cost model corrected, the plan changed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from stepgraph.errors import UsageError
from stepgraph.graphwise.graph_breaks import GraphRunner
from stepgraph.runtime.batches import LocalBatch
from stepgraph.runtime.compiled import Compiled
from stepgraph.runtime.compiler import Compiler
from stepgraph.runtime.meter import Meter
from stepgraph.runtime.replanning import SETTLING, Tally, plan_again

log = logging.getLogger("stepgraph")

ONLY_STEPS = "replan measures engine.step: steps of the split use are not counted"
NOT_IN_GRAPHS = "replan: a model that runs graph by graph is not planned by its costs"


class Replans:
    """The part of an Engine that plans again."""

    _compiler: Compiler
    _graphs: GraphRunner | None
    _optimizer: torch.optim.Optimizer | None
    _meter: Meter
    _after = 0  # so many steps are to be timed; 0: it is not asked for
    _tallies: dict[int, Tally]

    def replan(self, after: int) -> None:
        """Measures steps, corrects the cost model, and plans again if that pays: once a call, at most.

        Every rank calls it. Timed are ``after`` calls of :meth:`step` with batches of one shape, behind two
        that settle (what is compiled or captured runs for the first time, and bytes are counted). At the
        end of the last one the step's collectives are timed by themselves, and the slowest rank's figures
        are compared with what the plan's device says of the programs that ran: a time within 20 %, or a
        peak within 10 %, is right. Else the costs of computing, of communication and of memory are
        corrected by one factor each (``plan.request.correction``: it stays with the plan, its file, and all
        programs that are decided later), and the first rank plans again. The new plan is taken if its step
        is predicted to take 5 % less, or if the peak was over the budget and gets smaller; then the next
        call compiles, and parameters and optimizer states move to where it has them. They stay the same
        objects under their names, the optimizer goes on with its states, random operations draw what they
        would have drawn. ``stats.replans`` and ``report()`` say what was measured, corrected and changed.

        A peak is what an accelerator's allocator counts (the peak that it keeps is reset), and on the host
        the tensors of operations that run one by one (``lowering="eager"``; what a kernel takes inside
        itself is not seen, so the costs of memory are only raised there); of compiled code on the host, and
        of CUDA graphs, it is not measured.

        Args:
            after: steps to time.

        Raises:
            UsageError: nothing of the plan is searched for (``plan="auto"``, ``memory="auto"`` or
                ``"budget:..."``), so that it would be the same again; the model runs graph by graph;
                placements are searched for and the engine has no optimizer, whose states could move along.
        """
        request = self._compiler.plan.request
        if isinstance(after, bool) or not isinstance(after, int) or after < 1:
            raise UsageError(f"after must be a positive whole number of steps, got {after!r}")
        if not request.decided_by_cost:
            raise UsageError(
                "there is nothing to plan again",
                why=f"placement {request.placement!r} and memory {request.memory!r} are followed as they "
                "are, whatever they cost",
                do='give Engine plan="auto", memory="auto" or memory="budget:SIZE"',
            )
        if self._graphs is not None:
            raise UsageError(NOT_IN_GRAPHS, do="leave replan out")
        if request.searches and self._optimizer is None:
            raise UsageError(
                "an engine without an optimizer does not plan placements again",
                why="parameters would move, and the states of an optimizer of yours would stay",
                do="give Engine the optimizer, or a preset for the plan and memory='auto'",
            )
        with self._compiler.call(f"replan(after={after})"):
            self._after, self._tallies = after, {}

    def _measured(
        self, compiled: Compiled, batch: LocalBatch, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Runs one step and measures it; behind the last, it is planned again."""
        tally = self._tallies.setdefault(id(compiled), Tally(compiled))
        tally.runs += 1
        if tally.runs < SETTLING:
            return run()
        if tally.runs == SETTLING:
            programs = compiled.programs.values()
            held = [one for lowered in programs for one in lowered.held()]
            lowering = self._compiler.plan.lowering
            loss, tally.peak = self._meter.watched(run, held, batch.leaves, lowering)
            return loss
        loss, seconds = self._meter.timed(run)
        tally.seconds.append(seconds)
        if len(tally.seconds) == self._after:
            self._after, self._tallies = 0, {}
            self._plan_again(tally, batch)
        return loss

    def _plan_again(self, tally: Tally, batch: LocalBatch) -> None:
        compiler = self._compiler
        verdict, plan = plan_again(compiler, tally, batch, self._meter)
        compiler.stats.replans.append(verdict)
        if compiler.ranks.rank == 0:
            log.info("%s", verdict)
        if verdict.changed:
            compiler.change_plan(plan)
        elif verdict.correction is not None:
            compiler.plan = plan

    def _not_measured(self, why: str) -> None:
        """A call that is no step of a captured program, while steps are to be measured."""
        if self._after:
            self._compiler.report([why], falls_back=why == NOT_IN_GRAPHS)
            self._after *= why != NOT_IN_GRAPHS
