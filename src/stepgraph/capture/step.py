"""From a module to the global programs of a training step, an evaluation, the split use."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from stepgraph.analysis.loss_normalisation import by_rows, find_normalisation, inexact
from stepgraph.capture.counters import SharedCounters
from stepgraph.capture.first_call import set_up
from stepgraph.capture.module import BatchSpec, LossFunction, capture
from stepgraph.capture.optimizer import functionalize_optimizer
from stepgraph.capture.outside_tensors import about_outside
from stepgraph.capture.python_values import PythonValues
from stepgraph.capture.regions import written_in_regions
from stepgraph.capture.update import given_gradients, parameters_without_gradient
from stepgraph.capture.update_rules import FunctionalOptimizer
from stepgraph.errors import CaptureError, GraphBreakError
from stepgraph.planning.decisions import Normalisation
from stepgraph.planning.request import StepSettings
from stepgraph.program import roles
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.program.record import Pass


@dataclass
class Source:
    """What a step is captured from.

    ``batch`` has the global shape of one micro-batch; ``optimizer`` None: gradients only; ``counters`` are
    those of the run; ``device_type``: what it will run on, by default the host;
    ``says_difference``: note where the model is another one on the host; ``compares``: the Python values
    that its code reads will be compared from call to call.
    """

    model: nn.Module
    loss: LossFunction
    batch: BatchSpec
    optimizer: torch.optim.Optimizer | None = None
    counters: SharedCounters = field(default_factory=SharedCounters)
    device_type: str = ""
    says_difference: bool = False
    compares: bool = False


@dataclass
class Captured:
    """Global programs by name, and what runtime needs beside them.

    ``reduces_each``: gradients are reduced, in a type of their own, for every micro-batch. ``tree`` is the
    structure of what the loss callable returns; ``values``: what was read from Python; ``remarks``: what is
    to be known, and nothing falls back.
    """

    programs: dict[str, Program]
    optimizer: FunctionalOptimizer | None = None
    normalisation: Normalisation | None = None
    counters: SharedCounters = field(default_factory=SharedCounters)
    reduces_each: bool = False
    tree: Any = None
    notes: list[str] = field(default_factory=list)
    values: PythonValues = PythonValues()
    remarks: list[str] = field(default_factory=list)


def _remarks(program: Program, values: PythonValues) -> list[str]:
    return [*about_outside(values.tensors), *written_in_regions(program)]


@dataclass(frozen=True)
class Roads:
    """The passes, in order: of every program, of that which accumulates, the step, the split use."""

    simplified: Sequence[Pass]
    accumulated: Sequence[Pass]
    updated: Sequence[Pass]
    reduced: Sequence[Pass]
    updated_alone: Sequence[Pass]


@dataclass
class Capture:
    """Captures programs of one step."""

    source: Source
    settings: StepSettings
    roads: Roads
    driver: PassDriver

    def step(self, reduces_each: bool) -> Captured:
        """The programs ``step``, and ``accumulate`` with micro-batches.

        Args:
            reduces_each: accumulators are sharded, so gradients are reduced for every micro-batch.
        """
        source, settings = self.source, self.settings
        reduces_each = reduces_each and settings.micro_batches > 1
        joint, _, values = self._captured("step", micro_batches=settings.micro_batches)
        joint = self._simplified(joint, accumulate=settings.micro_batches > 1)
        notes = parameters_without_gradient(source.model, joint)
        remarks = _remarks(joint, values)
        optimizer = None if source.optimizer is None else self._functional(joint)
        programs: dict[str, Program] = {}
        normalisation = None
        if settings.micro_batches > 1:
            normalisation = self._normalisation(joint)
            if not normalisation.exact:
                notes.append(
                    "micro-batches: the loss is the mean over micro-batches, because "
                    f"{normalisation.reason}"
                )
            accumulate = joint.copy()
            accumulate.name = "accumulate"
            programs["accumulate"] = self.driver.through(
                self.roads.accumulated, accumulate, normalisation=normalisation
            )
        programs["step"] = self.driver.through(
            self.roads.updated,
            joint,
            normalisation=normalisation,
            micro_batches=settings.micro_batches,
            masters=self._masters(),
            precision=None if reduces_each else settings.precision,
            clip=settings.clip,
            optimizer=optimizer,
            counters=source.counters,
        )
        return Captured(
            programs,
            optimizer,
            normalisation,
            source.counters,
            reduces_each,
            notes=notes,
            values=values,
            remarks=remarks,
        )

    def evaluation(self, as_module: bool = False) -> Captured:
        """The forward alone: the program ``evaluate``."""
        program, tree, values = self._captured("evaluate", training=False, as_module=as_module)
        program = self._simplified(program, accumulate=False)
        remarks = _remarks(program, values)
        return Captured({"evaluate": program}, tree=tree, values=values, remarks=remarks)

    def gradients(self, as_module: bool) -> Captured:
        """Forward and backward without an update: ``gradients``, split in two when it is lowered.

        Args:
            as_module: results and tangents are a module's; else the loss and its own.
        """
        joint, tree, values = self._captured("gradients", as_module=as_module)
        joint = self._simplified(joint, accumulate=False)
        notes = parameters_without_gradient(self.source.model, joint)
        remarks = _remarks(joint, values)
        joint = self.driver.through(
            self.roads.reduced, joint, masters=self._masters(), precision=self.settings.precision
        )
        return Captured(
            {"gradients": joint}, tree=tree, notes=notes, values=values, remarks=remarks
        )

    def update(self, names: Sequence[str]) -> Captured:
        """Clipping and optimizer alone, of the parameters that have a gradient: ``update``."""
        program = given_gradients(self.source.model, names)
        optimizer = self._functional(program)
        program = self.driver.through(
            self.roads.updated_alone,
            program,
            clip=self.settings.clip,
            optimizer=optimizer,
            counters=self.source.counters,
        )
        return Captured({"update": program}, optimizer, counters=self.source.counters)

    def _captured(
        self, name: str, batch: BatchSpec | None = None, **how: Any
    ) -> tuple[Program, Any, PythonValues]:
        source = self.source
        capturing = partial(
            capture,
            source.model,
            source.loss,
            batch or source.batch,
            compute_dtype=self.settings.precision.compute,
            device_type=source.device_type,
            says_difference=source.says_difference,
            compares=source.compares,
            **how,
        )
        try:
            program, tree, values = capturing()
        except GraphBreakError as error:
            if not set_up(source.model, error.where):
                raise
            program, tree, values = capturing()
        program.name = name
        return program, tree, values

    def _simplified(
        self, program: Program, accumulate: bool, driver: PassDriver | None = None
    ) -> Program:
        return (driver or self.driver).through(
            self.roads.simplified,
            program,
            masters=self._masters(),
            precision=self.settings.precision,
            accumulate=accumulate,
        )

    def _normalisation(self, joint: Program) -> Normalisation:
        """How the loss adds up over micro-batches; numbers in it are held against twice as many rows."""
        found = find_normalisation(joint)
        if not found.exact or not found.numbers:
            return found
        try:
            larger, *_ = self._captured("step", self.source.batch.with_twice_the_rows())
            larger = self._simplified(larger, accumulate=True, driver=PassDriver())
        except CaptureError as error:
            reason = f"it has numbers in it, and cannot be captured on other rows: {error.what}"
            return inexact(joint.result(roles.Loss()), reason)
        return by_rows(found, find_normalisation(larger), joint.result(roles.Loss()))

    def _masters(self) -> dict[str, torch.dtype]:
        """The types that parameters are stored in."""
        return {name: p.dtype for name, p in self.source.model.named_parameters()}

    def _functional(self, joint: Program) -> FunctionalOptimizer:
        source = self.source
        assert source.optimizer is not None
        named = dict(source.model.named_parameters())
        learned = {name: named[name] for name in joint.gradients}
        optimizer = functionalize_optimizer(source.optimizer, learned)
        present = {
            (name, key): value
            for name, parameter in learned.items()
            for key, value in source.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        source.counters.cover(optimizer, learned, present)
        return optimizer
