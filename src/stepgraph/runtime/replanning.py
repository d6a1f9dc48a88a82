"""Planning again what was measured: the cost model corrected, and another plan where that pays.

The first rank decides, from the slowest rank's figures, and the others take its plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stepgraph.contest import make_best, room_of
from stepgraph.cost.correction import Correction, Measured, correct, corrected
from stepgraph.cost.devices import find_device
from stepgraph.cost.predict import Prediction, predict
from stepgraph.errors import PlanError, StepgraphError
from stepgraph.pipeline import as_executed, foresee
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import Request
from stepgraph.planning.sizes import show_bytes
from stepgraph.program.program import Program
from stepgraph.runtime.batches import LocalBatch
from stepgraph.runtime.compiled import Compiled
from stepgraph.runtime.compiler import Compiler
from stepgraph.runtime.meter import Meter
from stepgraph.runtime.progress import doing
from stepgraph.runtime.ranks import from_first_rank, largest

# A step must be predicted to take so much less: predictions of like plans differ by a few percent, and to
# compile again takes as long as many steps.
WORTH = 1.05
# Steps of a program that are not timed: the first runs what was just compiled, and is captured where its
# lowering captures at the second, which is also the one whose bytes are counted.
SETTLING = 2


@dataclass(frozen=True)
class Replanned:
    """What ``engine.replan`` has come to.

    Attributes:
        step: behind which it was planned again.
        steps: that were timed.
        measured: on the slowest rank.
        predicted: the step as it was predicted.
        correction: of the costs, from here on; None: they were right.
        step_ms: what the plan in force is predicted to take under it, and what another one.
        changed: whether the plan did.
        why: in words.
        seconds: that it took to time collectives and to plan again.
    """

    step: int
    steps: int
    measured: Measured
    predicted: Prediction
    correction: Correction | None = None
    step_ms: tuple[float, ...] = ()
    changed: bool = False
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        found, said = self.measured, self.predicted
        parts = [f"a step takes {found.step_ms:.4g} ms (predicted: {said.step_ms:.4g})"]
        if found.communication_ms is not None:
            predicted = f"{said.communication_ms:.4g}"
            parts.append(f"its collectives {found.communication_ms:.4g} ms ({predicted})")
        if found.peak_bytes is not None:
            predicted = show_bytes(said.peak_bytes)
            parts.append(f"its peak is {show_bytes(found.peak_bytes)} ({predicted})")
        else:
            parts.append("its peak was not measured")
        verdict = "the plan changed" if self.changed else "the plan stays"
        return (
            f"replan after step {self.step} ({self.steps} timed, {self.seconds:.1f} s): "
            f"{', '.join(parts)}; {verdict}: {self.why}"
        )


@dataclass
class Tally:
    """What was measured of one program of a step, on batches of one shape."""

    compiled: Compiled
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None


def plan_again(
    compiler: Compiler, tally: Tally, batch: LocalBatch, meter: Meter
) -> tuple[Replanned, Plan]:
    """What comes of what was measured, and the plan to go on with; called by all ranks.

    Args:
        batch: like those of the steps that were measured.
    """
    start = time.perf_counter()
    measured = _measured(compiler, tally, meter)
    found: tuple[Replanned, Plan] | None = None
    try:
        if compiler.ranks.rank == 0:
            with doing("planning again"):
                verdict, plan = _decide(compiler, tally, batch, measured)
            found = replace(verdict, seconds=time.perf_counter() - start), plan
    finally:
        found = from_first_rank(found)
    if found is None:
        raise PlanError("the first rank could not plan again", do="its own error says why")
    return found


def _measured(compiler: Compiler, tally: Tally, meter: Meter) -> Measured:
    """The slowest rank's figures, the same on every rank."""
    ranks = compiler.ranks
    runs = [
        (lowered.program, 1 if name == "step" else compiler.settings.micro_batches - 1)
        for name, lowered in tally.compiled.programs.items()
    ]
    sent = meter.communication(runs, ranks.groups) if ranks.groups else None
    step, sent_most, peak = largest(
        ranks,
        round(statistics.median(tally.seconds) * 1e9),
        -1 if sent is None else round(sent * 1e9),
        -1 if tally.peak is None else tally.peak,
    )
    return Measured(
        step / 1e6,
        None if sent_most < 0 else sent_most / 1e6,
        None if peak < 0 else peak,
        peak_at_least=not meter.sees_all,
    )


def _decide(
    compiler: Compiler, tally: Tally, batch: LocalBatch, measured: Measured
) -> tuple[Replanned, Plan]:
    """The verdict of the first rank, and the plan."""
    plan, request = compiler.plan, compiler.plan.request
    programs = {name: lowered.program for name, lowered in tally.compiled.programs.items()}
    under = _Predictions(programs, request)
    found = correct(measured, under, request.known)
    before = under(request.known)
    verdict = Replanned(compiler.stats.steps, len(tally.seconds), measured, before)
    if found == request.known:
        return replace(verdict, why="the cost model is right"), plan
    told = f"corrected: {found}"
    now = under(found)
    verdict = replace(verdict, correction=found, step_ms=(now.step_ms,))
    try:
        best, then = _best(compiler, batch, plan.under(correction=found))
    except StepgraphError as error:
        why = f"{told}, under which there is none ({error.what})"
        return replace(verdict, correction=None, why=why), plan
    verdict = replace(verdict, step_ms=(now.step_ms, then.step_ms))
    most = room_of(best.request)
    gain = f"{now.step_ms:.4g} -> {then.step_ms:.4g} ms predicted"
    over = now.peak_bytes > most
    if over and then.peak_bytes < now.peak_bytes:
        fits = show_bytes(int(now.peak_bytes * found.memory))
        why = f"{told}; its peak of {fits} was over the budget; {gain}"
        return replace(verdict, changed=True, why=why), replace(best, predicted=then)
    if now.step_ms < WORTH * then.step_ms or (then.peak_bytes > most and not over):
        # What is decided stays, and the correction counts for programs that come.
        kept = replace(plan, request=best.request, predicted=now)
        return replace(verdict, why=f"{told}; another would not pay ({gain})"), kept
    return replace(verdict, changed=True, why=f"{told}; {gain}"), replace(best, predicted=then)


class _Predictions:
    """What a step of the programs at hand takes, under any correction of the device."""

    def __init__(self, programs: Mapping[str, Program], request: Request) -> None:
        self._programs = as_executed(programs, request.lowering)
        self._device = find_device(request.device)
        self._micro_batches = request.step.micro_batches

    def __call__(self, correction: Correction) -> Prediction:
        device = corrected(self._device, correction)
        return predict(self._programs, device, self._micro_batches)


def _best(compiler: Compiler, batch: LocalBatch, plan: Plan) -> tuple[Plan, Prediction]:
    """The answer to a request without decisions, and what a step takes under it."""
    with compiler.capturing():
        captured = compiler.capture_step(batch)
    where = compiler.ranks.target, compiler.ranks.rank
    made = make_best(captured.programs, plan, *where, strict=compiler.strict)
    request = made.plan.request
    steps = request.step.micro_batches
    return made.plan, foresee(made.programs, request.costs(), request.lowering, steps, keep=False)
