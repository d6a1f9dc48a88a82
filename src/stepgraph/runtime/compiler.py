"""From a batch to compiled programs: what Engine and parallelize() share."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from stepgraph.capture.module import BatchSpec, LossFunction
from stepgraph.capture.refusals import check_hooks, check_parameter_hooks
from stepgraph.capture.step import Capture, Captured, Source
from stepgraph.contest import make_best
from stepgraph.errors import StepgraphError, StrictError, UsageError
from stepgraph.lowering.apply import prepare
from stepgraph.lowering.decide import check_target
from stepgraph.pipeline import Made, capture_of
from stepgraph.placement.decide import reduces_each_micro_batch
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from stepgraph.program.digest import digest_of
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.runtime.batches import KindsOfBatch, LocalBatch, global_spec
from stepgraph.runtime.calls import Calls, alone
from stepgraph.runtime.checks import Checks
from stepgraph.runtime.compiled import Compiled, SameProgram
from stepgraph.runtime.executor import LoweredProgram, SplitProgram, lower_for_rank
from stepgraph.runtime.host_memory import check_host_memory
from stepgraph.runtime.modes import evaluation_mode
from stepgraph.runtime.names import check_names
from stepgraph.runtime.outside import OutsideTensors
from stepgraph.runtime.progress import doing
from stepgraph.runtime.ranks import from_first_rank
from stepgraph.runtime.recompiles import (
    Stats,
    before_compiling,
    changed_value,
    count_call,
    recompilation_reason,
)
from stepgraph.runtime.state import State
from stepgraph.runtime.watch import Watch
from stepgraph.torch_internals import hooks, pytree
from stepgraph.torch_internals.modules import Look
from stepgraph.torch_internals.watchers import unwatched

log = logging.getLogger("stepgraph")

MAX_SHAPES = 8
_CONVERTED = "parameters or buffers were converted to another type"
_PLANNED_AGAIN = "it was planned again, for costs that were measured"
_COUNTED_APART = "parameters that were updated together at every step no longer are"


@dataclass
class Compiler:
    """Compiles entry points, each once for a kind of batch, and keeps the programs.

    ``as_module``: results are those of a module (this rank's rows), not of a loss callable. ``watch``:
    tells whether other ranks do the same. ``needs_values``: to compile for a model that was not filled yet
    is an error. ``capturing``: the model is as it is captured. ``call``: one call of an entry point, of
    which every rank makes the same.
    """

    state: State
    loss: LossFunction
    plan: Plan
    max_grad_norm: float | None = None
    strict: bool = False
    max_shapes: int = MAX_SHAPES
    as_module: bool = False
    watch: Watch | None = None
    needs_values: bool = True
    capturing: Callable[[], AbstractContextManager] = contextlib.nullcontext
    stats: Stats = field(default_factory=Stats)
    programs: dict[str, Program] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def settings(self) -> StepSettings:
        """What the step is."""
        return self.plan.request.step

    def __post_init__(self) -> None:
        state = self.state
        self.model, self.optimizer, self.ranks = state.model, state.optimizer, state.ranks
        self.parameters = list(self.model.parameters())
        self.checks = Checks(self.model)
        self._parts = self.checks.look().parts
        self._outside = OutsideTensors(state)
        self.kinds = KindsOfBatch(self.ranks, self.max_shapes)
        self._compiled: dict[str, dict[tuple, list[Compiled]]] = {}
        self._counters = self.state.counters.version
        self._outdated: set[tuple] = set()
        self._dropped: dict[str, str] = {}  # entry points that are made anew, and why
        self._digest = 0  # of what was captured last
        self._others: list[Compiled] = []  # of the kind of call that is being compiled
        self._last: dict[tuple, int] = {}  # what each kind of call has run last
        self.call = alone if self.watch is None else Calls(self.watch, self.kinds).one

    def entry(self, name: str, batch: LocalBatch) -> Compiled:
        """The programs of an entry point (step, gradients, evaluate) for a batch like this one."""
        count_call(self, name)
        now = self._checked()
        key = (batch.key, *self._model_as(name, now))
        self._drop_outdated()
        self.kinds.meet(name, batch)
        known = self._compiled.setdefault(name, {})
        fitting = self.checks.that_holds(known.get(key, ()), self.capturing)
        if fitting is not None:
            return self._chosen(fitting, name, key)
        if self.needs_values:
            self.state.check_filled()
        if key in known:
            with self.capturing():
                reason = changed_value(name, known[key], self.max_shapes)
        else:
            reason = recompilation_reason(name, known, batch, key, self.model)
        self._others = known.get(key, [])
        try:
            compiled = self._counted(name, key, reason, lambda: self._compile(name, batch))
        except SameProgram as found:
            compiled = replace(found.compiled, values=found.values)
        key = (batch.key, *self._model_as(name, self._checked()))  # capturing may put in hooks
        known.setdefault(key, []).append(compiled)
        return self._chosen(compiled, name, key)

    def _checked(self) -> Look:
        """What the model looks like, where programs can run so."""
        now, optimizer = self.checks.look(), self.optimizer
        if now.backward_hooks or (optimizer is not None and hooks.step_hooks(optimizer)):
            check_hooks(self.model, self.optimizer)
        self._check_tensors(now)
        if any(map(hooks.gradient_hooks, self.parameters)):
            check_parameter_hooks(self.model)
        return now

    def _model_as(self, name: str, now: Look) -> tuple:
        """How the model is, as far as a program of an entry point depends on it."""
        flags = tuple(parameter.requires_grad for parameter in self.parameters)
        modes = now.training if name != "evaluate" or self.as_module else None
        return flags, (modes, now.forward_hooks, now.structure)

    def made_for(self, name: str) -> list[tuple[tuple, Compiled]]:
        """The programs of an entry point that fit the model now, each with what it was made for."""
        now, known = self._model_as(name, self._checked()), self._compiled.get(name, {})
        fitting = [(key, one) for key in known if key[1:] == now for one in known[key]]
        return [(key, one) for key, one in fitting if self.checks.that_holds([one], self.capturing)]

    def check_again(self, name: str, key: tuple, compiled: Compiled) -> None:
        """Before a call of programs that somebody else chose, for all that :meth:`entry` looks at.

        Raises:
            UsageError: the model is not what they were made for.
        """
        now, changed = self._checked(), ""
        if self.checks.that_holds([compiled], self.capturing) is None:
            with self.capturing():
                changed = compiled.values.broken()
        if not changed and key[1:] != self._model_as(name, now):
            changed = "which parameters are trained, modes, hooks or modules"
        if changed or not any(c is compiled for c in self._compiled.get(name, {}).get(key, ())):
            raise UsageError(
                f"the module has changed since torch.compile traced it: {changed or 'its types'}",
                do="torch.compiler.reset() after such a change, or call it without torch.compile",
            )
        self.state.check_filled()
        self._outside.bring(compiled.values.tensors)

    def _chosen(self, compiled: Compiled, name: str, key: tuple) -> Compiled:
        """Of several for one kind of batch, every rank takes the same; what it reads outside is brought."""
        self._outside.bring(compiled.values.tensors)
        if self.watch is not None:
            if self._last.setdefault((name, key), compiled.digest) != compiled.digest:
                self._last[name, key] = compiled.digest
                self.watch.changes_to(compiled.digest)
            self.watch.runs(compiled.digest)
        return compiled

    def _check_tensors(self, now: Look) -> None:
        """Programs take the tensors that the model had when it was given, whatever it holds now.

        Args:
            now: what it looks like.

        Raises:
            UsageError: a parameter was replaced, added, removed or moved; a buffer has another shape.
        """
        same = [*map(id, now.parameters)] == [*map(id, self.parameters)]
        if not same or now.parts is not self._parts:
            check_names(self.model, self.state.parameters, self.state.buffers)
            self._parts = now.parts
        if self.state.adopt_converted():
            self._drop_all(_CONVERTED)
        self.checks.check_data()

    def update(self, names: Sequence[str]) -> LoweredProgram:
        """The program that updates these parameters from gradients that the caller holds."""
        name, key = "optimizer_step", tuple(names)
        count_call(self, name)
        self._drop_outdated()
        known = self._compiled.setdefault(name, {})

        def compile_update() -> Compiled:
            capture = self._capture(BatchSpec((), (), pytree.tree_structure(())))
            return Compiled(self._made(lambda: capture.update(names))[0])

        if key not in known:
            self._others = []
            reason = f"{name}: other parameters have gradients" if known else None
            known[key] = [self._counted(name, key, reason, compile_update)]
        return known[key][0].programs["update"]

    def _counted(
        self, name: str, key: tuple, reason: str | None, compile_: Callable[[], Compiled]
    ) -> Compiled:
        """One compilation of an entry point, unless a :func:`no_recompiles` block forbids it."""
        if name in self._dropped:
            reason = f"{name}: {self._dropped.pop(name)}"
        if (name, key) in self._outdated:
            reason = f"{name}: {_COUNTED_APART}"
        if reason is not None:
            before_compiling(self, name, reason)
        with self.stats.counting(reason), unwatched(), self.capturing():
            compiled = compile_()
            compiled.digest = self._digest
            return compiled

    def goes_graph_by_graph(self, name: str, error: StepgraphError) -> None:
        """From here on: a compilation of what was captured whole until now."""
        if self._compiled.get(name):
            reason = f"{name}: graph by graph from here on, because of {error.what}"
            before_compiling(self, name, reason)
            self.stats.recompiles.append(reason)

    def change_lowering(self, name: str) -> None:
        """What is compiled from here on is lowered so; programs of the split use are made anew."""
        check_target(name, self.ranks.target)
        if name != self.plan.lowering:
            self.plan = self.plan.under(lowering=name)
            self._compiled.pop("gradients", None)
            self._compiled.pop("optimizer_step", None)

    def change_plan(self, plan: Plan) -> None:
        """What is compiled from here on follows another plan, and everything is compiled anew.

        Tensors are placed otherwise when the first program takes them so.
        """
        self.plan = plan
        for compiled in (c for known in self._compiled.values() for c in sum(known.values(), [])):
            compiled.release()
        self._drop_all(_PLANNED_AGAIN)
        self.state.forget_programs()
        self.programs.clear()
        self._others = []

    def _drop_all(self, why: str) -> None:
        self._dropped |= {name: why for name, known in self._compiled.items() if known}
        self._compiled.clear()

    def _drop_outdated(self) -> None:
        """Forgets programs that share step counters which are no longer shared."""
        if self._counters == self.state.counters.version:
            return
        self._counters = self.state.counters.version
        for name, known in self._compiled.items():
            for key in [k for k, several in known.items() if any(map(self._is_outdated, several))]:
                del known[key]
                self._outdated.add((name, key))

    def _is_outdated(self, compiled: Compiled) -> bool:
        return any(
            isinstance(role, roles.OptimizerState) and role not in self.state.tensors
            for lowered in compiled.programs.values()
            for role in lowered.program.inputs
        )

    def _capture(self, spec: BatchSpec, step: StepSettings | None = None) -> Capture:
        where = self.state.device.type
        source = Source(
            self.model, self.loss, spec, self.optimizer, self.state.counters, where, compares=True
        )
        return capture_of(source, step or self.settings)

    def _compile(self, name: str, batch: LocalBatch) -> Compiled:
        if name == "step":
            programs, captured = self._made(lambda: self.capture_step(batch))
            return Compiled(programs, values=captured.values)
        step = replace(self.settings, micro_batches=1)
        spec = global_spec(batch, 1, self.ranks.shape.data_size, name == "gradients")
        capture = self._capture(spec, step)
        if name == "gradients":
            sides, captured = self._made(lambda: capture.gradients(self.as_module), in_two=True)
            split = SplitProgram(sides["forward"], sides["backward"], self.state)
            results = self._results(captured, name, batch, step)
            return Compiled(sides, results, split, captured.values)
        mode = contextlib.nullcontext() if self.as_module else evaluation_mode(self.model)
        with mode:
            programs, captured = self._made(lambda: capture.evaluation(self.as_module))
            results = self._results(captured, name, batch, step)
        return Compiled(programs, results, values=captured.values)

    def capture_step(self, batch: LocalBatch) -> Captured:
        """The global programs of a step on batches like this one."""
        step, mesh = self.settings, self.ranks.shape
        spec = global_spec(batch, step.micro_batches, mesh.data_size)
        return self._capture(spec, step).step(reduces_each_micro_batch(self.plan.placement, mesh))

    def _results(self, captured: Captured, name: str, batch: LocalBatch, step: StepSettings) -> Any:
        """The structure of what is returned; numbers of a module's are those of this rank's rows."""
        if not self.as_module or self.ranks.shape.data_size == 1 or not captured.tree.has_numbers:
            return captured.tree
        own = self._capture(global_spec(batch, 1, 1, name == "gradients"), step)
        return (own.gradients(True) if name == "gradients" else own.evaluation(True)).tree

    def _made(
        self, capture: Callable[[], Captured], in_two: bool = False
    ) -> tuple[dict[str, LoweredProgram], Captured]:
        """Captures, decides, applies and lowers; ``in_two``: forward and backward each by itself."""
        driver = PassDriver()
        prepare(self.plan.lowering, self.ranks.target)
        captured, made = self._decided(capture, driver)
        self.plan = made.plan
        notes = [note for program in made.programs.values() for note in program.notes]
        self.report([*captured.notes, *dict.fromkeys(notes)])
        kept = [decided.memory for decided in made.decided.values()]
        chosen = [memory.reason for memory in kept if memory is not None and memory.reason]
        self.report([*captured.remarks, *chosen], falls_back=False)
        lowered: dict[str, LoweredProgram] = {}
        for name, program in made.programs.items():
            check_host_memory(program, made.decided[name].memory, self.ranks.shape.world_size)
            self.state.prepare(program, captured.optimizer, self.max_grad_norm)
            self.programs[name] = program
            decision = made.decided[name].lowering
            assert decision is not None
            names = ("forward", "backward") if in_two else (name,)
            with doing(f"compiling {name} ({decision.name})"):
                sides = lower_for_rank(program, decision, self.state, driver, in_two)
            lowered |= zip(names, sides, strict=True)
        return lowered, captured

    def _decided(
        self, capture: Callable[[], Captured], driver: PassDriver
    ) -> tuple[Captured, Made]:
        """Where a solver decides, the first rank does, and the others replay its decisions.

        Machines need not have been measured alike, nor be equally fast.
        """

        def make_all() -> tuple[Captured, Made]:
            with doing("capturing the step's code"):
                captured = capture()
            self._digest = digest_of(captured.programs)
            same = next((one for one in self._others if one.digest == self._digest), None)
            if same is not None:
                raise SameProgram(same, captured.values)
            where = (self.ranks.target, self.ranks.rank)
            with doing(f"planning ({self.plan.placement} on {self.ranks.shape})"):
                made = make_best(
                    captured.programs, self.plan, *where, driver=driver, strict=self.strict
                )
            return captured, made

        if not self.plan.request.decided_by_cost or self.ranks.shape.world_size == 1:
            return make_all()
        if self.ranks.rank:
            decisions = from_first_rank(None)
            if decisions is not None:  # else it raised, and so will this rank
                self.plan = replace(self.plan, decisions=decisions)
            return make_all()
        decisions = None
        try:
            captured, made = make_all()
            decisions = made.plan.decisions
            return captured, made
        finally:
            from_first_rank(decisions)

    def report(self, notes: list[str], falls_back: bool = True) -> None:
        """Says what falls back, once, on the first rank.

        Args:
            falls_back: False: it is to be known, and nothing falls back.

        Raises:
            StrictError: under ``strict=True``, of what falls back.
        """
        new = [note for note in notes if note not in self.notes]
        if new and self.strict and falls_back:
            raise StrictError(
                "strict=True, and the step would fall back: " + "; ".join(new),
                do="remove the cause, or strict=False to accept and report it",
            )
        for note in new if self.ranks.rank == 0 else ():
            log.warning("%s", note)
        self.notes += new
