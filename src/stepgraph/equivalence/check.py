"""Checks a compiled step by execution: every pass, before and after it, all ranks in one process.

Each pass is run on the programs it gets in the real pipeline; the Program before it and the Program
after it are executed on the same values, and every result that both have is compared as a global
tensor. So a wrong result is found at the pass that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stepgraph.capture.module import LossFunction, default_loss
from stepgraph.capture.step import Captured, Source
from stepgraph.contest import make_best, rivals
from stepgraph.cost.devices import device_at_hand
from stepgraph.equivalence.comparing import CheckReport, compare
from stepgraph.equivalence.lowered import run_lowered
from stepgraph.equivalence.values import GlobalValues
from stepgraph.errors import InvariantError
from stepgraph.lowering.decide import decide as decide_lowering
from stepgraph.pipeline import LOWERED, capture_of, make
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.planning.plan import Plan, preset_plan
from stepgraph.planning.request import AS_IT_IS, Precision, StepSettings
from stepgraph.planning.target import usual_target
from stepgraph.program.driver import PassDriver
from stepgraph.program.layout import MeshShape
from stepgraph.program.program import Program
from stepgraph.program.record import SUMMATION, Pass, Results, Rewrite
from stepgraph.program.text import program_text
from stepgraph.runtime.batches import LocalBatch, flatten_batch, global_spec
from stepgraph.runtime.modes import evaluation_mode
from stepgraph.runtime.ranks import parse_mesh

ENTRIES = ("step", "evaluate", "gradients", "update")


def check_model(
    model: nn.Module,
    *,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any,
    mesh: str | MeshShape = "dp=1",
    plan: str | Plan = "zero3",
    memory: str | None = None,
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    replaced: Mapping[str, Rewrite] | None = None,
    seed: int = 0,
    precision: Precision = AS_IT_IS,
    entries: Sequence[str] = ENTRIES,
    lowerings: Sequence[str] = (),
) -> CheckReport:
    """Checks every pass of the programs of a plain module, on a mesh that need not exist.

    Args:
        model: with real parameters; it is not changed.
        batch: the *global* batch.
        mesh: names and sizes; all its ranks run in this process.
        replaced: rewritings to run in place of passes', by name (to plant a bug).
        seed: of the optimizer states that the programs are run on.
        entries: the entry points whose programs are checked.
        lowerings: names of those whose code is run as well, beside the program that it was made of.

    Returns:
        a report with one line a pass.
    """
    shape = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    made = preset_plan(plan, shape) if isinstance(plan, str) else plan
    step = StepSettings(
        None if optimizer is None else type(optimizer).__name__.lower(),
        micro_batches,
        max_grad_norm is not None,
        precision,
    )
    made = made.under(memory=memory or made.memory, step=step)
    device = next(model.parameters()).device
    if made.request.decided_by_cost and not made.request.device:
        made = made.under(device=device_at_hand(device.type).name)
    local = flatten_batch(batch, device)
    checker = _Checker(model, loss or default_loss, optimizer, made, local, max_grad_norm, seed)
    return checker.run(dict(replaced or {}), entries, lowerings)


class _Checker:
    """Runs the pipeline with an observer that executes every pass's input and output."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        batch: LocalBatch,
        max_grad_norm: float | None,
        seed: int,
    ) -> None:
        self.plan, self.batch, self.seed, self.max_grad_norm = plan, batch, seed, max_grad_norm
        self.target = usual_target(next(model.parameters()).device.type)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.report = CheckReport()
        self.bound: dict[str, list[Program]] = {}
        self.captured = False
        self._executed: tuple[tuple, Results] | None = None
        self.driver = PassDriver()
        self.values = self._values("step")

    def _values(self, entry: str) -> GlobalValues:
        step = self.plan.request.step
        self.settings = step if entry == "step" else replace(step, micro_batches=1)
        self.source = Source(
            self.model,
            self.loss,
            global_spec(self.batch, self.settings.micro_batches, 1),  # the batch is global already
            None if entry == "gradients" else self.optimizer,
        )
        return GlobalValues(self.source, self.batch, self.settings, self.max_grad_norm, self.seed)

    def run(
        self, replaced: dict[str, Rewrite], entries: Sequence[str], lowerings: Sequence[str]
    ) -> CheckReport:
        self.driver = PassDriver(invariants=True, observe=self.compare, replaced=replaced)
        for entry in entries:
            if entry == "update" and self.optimizer is None:
                continue
            self.values, self.bound, self.captured = self._values(entry), {}, False
            self._executed = None
            try:
                programs = self._capture(entry).programs
                if rivals(programs, self.plan):
                    self.plan = make_best(programs, self.plan, self.target).plan
                self.plan = make(programs, self.plan, self.target, driver=self.driver).plan
                for ranks in self.bound.values():
                    self._check_lowering(ranks, lowerings)
            except InvariantError as error:
                last = self.driver.runs[-1]  # its result cannot even be run
                self.report.fail(last.name, last.program, error.what)
            if not self.report.ok:
                break
        return self.report

    def _capture(self, entry: str) -> Captured:
        capture = capture_of(self.source, self.settings, self.driver)
        match entry:
            case "step":
                return capture.step(reduces_each_micro_batch(self.plan.placement, self.plan.mesh))
            case "evaluate":
                with evaluation_mode(self.model):
                    return capture.evaluation()
            case "gradients":
                return capture.gradients(as_module=False)
        learned = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return capture.update(learned)

    def compare(
        self, step: Pass, before: Program, after: Program, arguments: Mapping[str, Any]
    ) -> None:
        """The observer of the pass driver."""
        if not self.report.ok:
            return  # what follows a wrong pass is wrong too
        if not self.captured and after.name != "update":
            values = self.values
            plain = values.evaluated() if after.name == "evaluate" else values.eager()
            self._compare("capture", SUMMATION, before, plain, self._execute(before))
        self.captured = True
        try:
            old: Results | None = None
            ranks = self.bound.get(after.name)  # once it is bound, each has a program of its own
            if ranks:
                old = self.values.execute(ranks)
            elif step.reference is None:
                old = self._execute(before)
            else:
                old = step.reference(self.values, before, after, **arguments)
                self._executed = None  # a reference may have put other values into accumulators
            if ranks or "rank" in arguments:
                copies = [before.copy() for _ in range(1, self.plan.mesh.world_size)]
                others = self._rewritten(step, ranks[1:] if ranks else copies, arguments)
                self.bound[after.name] = [after, *others]
                new = self.values.execute(self.bound[after.name])
            else:
                new = self._execute(after)
        except AssertionError as error:
            self.report.fail(step.name, after.name, str(error))
            return
        if after.name == "accumulate" and after.mesh is None:
            self.values.accumulating = after
        self._compare(step.name, step.preserves, after, old, new)

    def _execute(self, program: Program) -> Results:
        """Results of a Program; most passes leave most programs as they found them."""
        constants = [
            id(getattr(program.module, str(node.target)))
            for node in program.graph.nodes
            if node.op == "get_attr"
        ]
        key = (program_text(program), *constants)
        if self._executed is None or self._executed[0] != key:
            self._executed = key, self.values.execute(program)
        return self._executed[1]

    def _rewritten(
        self, step: Pass, others: Sequence[Program], arguments: Mapping[str, Any]
    ) -> list[Program]:
        """What a pass makes of the programs of all ranks but the first."""
        rewrite = self.driver.replaced.get(step.name, step.rewrite)
        given = [
            {**arguments, "rank": rank} if "rank" in arguments else arguments
            for rank in range(1, len(others) + 1)
        ]
        return [rewrite(p.copy(), **how) for p, how in zip(others, given, strict=True)]

    def _check_lowering(self, bound: list[Program], lowerings: Sequence[str]) -> None:
        """Every rank's own program as it is executed; and the code that lowerings make of it."""
        driver = PassDriver(replaced=self.driver.replaced)
        before, name, program = self.values.execute(bound), "", bound[0]
        ranks, last = [program.copy() for program in bound], before
        try:
            for step in LOWERED:
                if not self.report.ok:
                    return
                name = step.name
                for fuses in (True, False) if "fuses" in step.takes else (True,):
                    ranks = [driver.through((step,), p, groups={}, fuses=fuses) for p in ranks]
                    after = self.values.execute(ranks, in_place=True)
                    self._compare(name, step.preserves, program, last, after)
                    last = after
            chosen = (decide_lowering(bound[0], name, self.target).name for name in lowerings)
            for name in dict.fromkeys(chosen):
                if self.report.ok:
                    after = run_lowered(self.values, bound, name, self.target)
                    self._compare(f"lowered by {name}", SUMMATION, program, before, after)
        except AssertionError as error:
            self.report.fail(name, program.name, str(error))

    def _compare(self, name: str, preserves: str, program: Program, old, new: Results) -> None:
        precision = self.settings.precision
        types = {dtype for dtype in (precision.compute, precision.reduce) if dtype is not None}
        compare(self.report, program.name, name, preserves, old, new, types)
