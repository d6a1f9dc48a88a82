"""Engine: what a training script holds."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import torch_internals
from stepgraph.capture.module import LossFunction, default_loss
from stepgraph.capture.precision import Precision
from stepgraph.capture.refusals import check_hooks
from stepgraph.errors import ShapeLimitError, StrictError, UsageError
from stepgraph.frontends.arguments import (
    check_arguments,
    check_kinds,
    device_of,
    make_plan,
)
from stepgraph.frontends.entries import Compiled, evaluation_mode, recompilation_reason, show_key
from stepgraph.lowering.lower import check_lowering
from stepgraph.memory.policies import parse_policy
from stepgraph.pipeline import PassDriver, StepRequest, compile_evaluation, compile_step
from stepgraph.placement.policies import stored_parameter
from stepgraph.planning.plan import Plan
from stepgraph.program import roles
from stepgraph.program.program import Program
from stepgraph.report.text import engine_report
from stepgraph.runtime.batches import LocalBatch, cut_micro_batches, flatten_batch, global_spec
from stepgraph.runtime.checkpoint import Saver
from stepgraph.runtime.executor import lower_for_rank
from stepgraph.runtime.extras import check_extras
from stepgraph.runtime.manifest import Manifest
from stepgraph.runtime.ranks import agree_on_shapes, join_ranks
from stepgraph.runtime.recompiles import Stats, before_compiling, count_call
from stepgraph.runtime.state import State
from stepgraph.runtime.weights_file import names_weights_file
from stepgraph.torch_internals import pytree

log = logging.getLogger("stepgraph")

MAX_SHAPES = 8


class Engine:
    """Compiles and runs a training step.

    Args:
        model: any ``nn.Module``, unmodified; may be on the meta device. Its parameters become DTensors
            under their own names, in place; ranks start from the first rank's values.
        loss: ``(model, batch) -> scalar``; by default ``model(**batch).loss`` or ``model(*batch)``.
        optimizer: a ``torch.optim`` instance over ``model.parameters()``; None leaves gradients in
            ``.grad``.
        mesh: ``"dp=4"``, a DeviceMesh, or None for every launched rank on ``dp``.
        plan: a preset (``ddp``, ``zero1``, ``zero2``, ``zero3``), a Plan, or the path of a plan file.
        memory: ``none``, ``full`` or ``layers:N``; None: the plan's own.
        schedule: ``"none"``; None: the plan's own.
        compute_dtype: floating-point parameters and batch leaves are cast to it in the program, before
            any gather; parameters stay as they are.
        reduce_dtype: of gradient reductions; None: the type they are computed in.
        max_grad_norm: clips gradients to this global 2-norm, inside the program.
        micro_batches: gradient accumulation, inside the program: each rank's batch is cut in so many.
        lowering: ``inductor`` or ``eager``; None: the plan's own (presets: ``inductor``).
        strict: a fallback that would be reported becomes an error.
        seed: of random operations; with the step's number it decides every mask, on any mesh.
        max_shapes: distinct batch shapes to keep compiled programs for.

    Raises:
        UsageError, MeshError, OptimizerError, HookError: from the constructor, before anything is
            changed; CaptureError and others from the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        mesh: str | DeviceMesh | None = None,
        plan: str | Path | Plan = "zero3",
        memory: str | None = None,
        schedule: str | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        micro_batches: int = 1,
        lowering: str | None = None,
        strict: bool = False,
        seed: int = 0,
        max_shapes: int = MAX_SHAPES,
    ) -> None:
        check_arguments(model, optimizer, micro_batches, schedule, compute_dtype, reduce_dtype)
        check_kinds(loss, mesh, plan, memory, lowering, max_grad_norm)
        if memory is not None:
            parse_policy(memory)
        if lowering is not None:
            check_lowering(lowering)
        check_hooks(model, optimizer)
        device = device_of(model)
        ranks = join_ranks(mesh, device)
        try:
            self.plan = make_plan(plan, ranks.shape, memory, lowering)
        except Exception:
            if ranks.owns_group:
                dist.destroy_process_group()
            raise
        self.model = model
        self.stats = Stats()
        self.programs: dict[str, Program] = {}
        self.notes: list[str] = []
        self._ranks, self._device = ranks, device
        self._loss = loss or default_loss
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._micro_batches = micro_batches
        self._precision = Precision(compute_dtype, reduce_dtype)
        self._strict, self._seed, self._max_shapes = strict, seed, max_shapes
        preset = self.plan.placement
        self._state = State(
            model,
            optimizer,
            ranks,
            lambda shape: stored_parameter(preset, shape, ranks.shape),
            device,
        )
        self._saver = Saver(self._state)
        self._parameters = list(model.parameters())
        self._compiled: dict[str, dict[tuple, Compiled]] = {"step": {}, "evaluate": {}}
        if ranks.owns_group:
            atexit.register(_leave_group)  # other engines may be using it until then

    # -- training

    def step(self, batch: Any) -> torch.Tensor:
        """Forward, backward and optimizer on one batch.

        Args:
            batch: this rank's part, a pytree of tensors; dimension 0 is the batch.

        Returns:
            the loss of one process on the global batch: a detached 0-dim tensor.
        """
        self._saver.check()
        local = flatten_batch(batch, self._device)
        pieces = cut_micro_batches(local, self._micro_batches)
        compiled = self._entry("step", local)
        self._state.update_numbers()
        if self._micro_batches > 1:
            self._state.clear_accumulators()
        for number, leaves in enumerate(pieces[:-1]):
            self._state.seed_random_operations(self._seed, self.stats.steps, number)
            compiled.programs["accumulate"].run(leaves)
        self._state.seed_random_operations(self._seed, self.stats.steps, len(pieces) - 1)
        results = compiled.programs["step"].run(pieces[-1])
        self._set_gradients(results)
        if self._optimizer is not None:
            torch_internals.mark_stepped(self._optimizer)
        self.stats.steps += 1
        return results[roles.Loss()]

    def evaluate(self, batch: Any) -> Any:
        """What the loss callable returns for the global batch, in evaluation mode, no gradients.

        Args:
            batch: this rank's part of the batch.

        Returns:
            the loss callable's result; tensors are those of the global batch.
        """
        local = flatten_batch(batch, self._device)
        compiled = self._entry("evaluate", local)
        self._state.seed_random_operations(self._seed, self.stats.steps, 0)
        results = compiled.programs["evaluate"].run(local.leaves)
        leaves = {
            role.index: value
            for role, value in results.items()
            if isinstance(role, roles.UserOutput)
        }
        return pytree.tree_unflatten([leaves[i] for i in sorted(leaves)], compiled.result_tree)

    def _set_gradients(self, results: Mapping[roles.Output, torch.Tensor]) -> None:
        if self._optimizer is not None:
            return
        for role, tensor in results.items():
            if isinstance(role, roles.Grad):
                self._state.set_gradient(role.name, tensor, self.programs["step"])

    # -- compiling

    def _entry(self, entry: str, batch: LocalBatch) -> Compiled:
        """The compiled programs of an entry point for this batch's shapes."""
        count_call(self, entry)
        check_hooks(self.model, self._optimizer)
        flags = tuple(parameter.requires_grad for parameter in self._parameters)
        modes = torch_internals.module_modes(self.model, with_training=entry == "step")
        key = (batch.key, flags, modes)
        known = self._compiled[entry]
        if key not in known:
            self._state.check_filled()
            reason = recompilation_reason(entry, known, batch, key, self.model)
            if reason is not None:
                before_compiling(self, entry, reason)
            if len({k[0] for k in known} | {key[0]}) > self._max_shapes:
                raise ShapeLimitError(
                    f"{len(known) + 1} different batch shapes; programs are kept for "
                    f"{self._max_shapes}",
                    why="so far: " + "; ".join(show_key(k) for k in known),
                    do="pad batches to a few lengths, or raise max_shapes",
                )
            agree_on_shapes(batch.key, batch.shapes(), self._ranks)
            start = time.perf_counter()
            known[key] = self._compile(entry, batch)
            self.stats.compiles += 1
            self.stats.compile_seconds += time.perf_counter() - start
            if reason is not None:
                self.stats.recompiles.append(reason)
        return known[key]

    def _compile(self, entry: str, batch: LocalBatch) -> Compiled:
        micro = self._micro_batches if entry == "step" else 1
        request = StepRequest(
            self.model,
            self._loss,
            global_spec(batch, micro, self._ranks.shape.data_size),
            self.plan,
            self._optimizer,
            micro,
            self._max_grad_norm is not None,
            self._precision,
        )
        driver = PassDriver()
        tree = None
        if entry == "step":
            compiled = compile_step(request, driver)
            programs, notes, functional = compiled.programs, compiled.notes, compiled.optimizer
        else:
            with evaluation_mode(self.model):
                program, tree = compile_evaluation(request, driver)
            programs, notes, functional = {entry: program}, program.notes, None
        self._report_notes(notes)
        lowered = {}
        for name, program in programs.items():
            inputs = dict(zip(program.inputs, program.input_values, strict=True))
            self._state.prepare(inputs, functional, self._max_grad_norm)
            lowered[name] = lower_for_rank(
                program, self.plan.lowering, self._ranks, self._state, driver
            )
            self.programs[name] = program
        return Compiled(lowered, tree)

    def _report_notes(self, notes: list[str]) -> None:
        new = [note for note in notes if note not in self.notes]
        if new and self._strict:
            raise StrictError(
                "strict=True, and the step would fall back: " + "; ".join(new),
                do="remove the cause, or strict=False to accept and report it",
            )
        for note in new:
            log.warning("%s", note)
        self.notes += new

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The plain module's keys, tied names and buffers included; DTensor values."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fills the model from whole or distributed tensors.

        Raises:
            CheckpointError: keys or shapes that do not fit.
        """
        self._state.load_state_dict(state_dict)

    @property
    def seed(self) -> int:
        """The seed of random operations; ``load`` takes over the one that was saved."""
        return self._seed

    def save(
        self, directory: str | Path, extra: Mapping[str, Any] | None = None, wait: bool = True
    ) -> None:
        """Saves a checkpoint: model, optimizer, step and seed, and the extras; called by every rank.

        It appears under its name when it is complete, in one step, and replaces one that is there.
        Plain PyTorch reads it with ``torch.distributed.checkpoint`` (``model`` and ``optimizer`` under
        the model's own names).

        Args:
            directory: a folder that all ranks reach. A name that ends in ``.safetensors``, ``.pt`` or
                ``.pth`` means one file with the whole weights alone, for any other program.
            extra: objects with ``state_dict`` and ``load_state_dict`` (a data loader, a scheduler), by
                name.
            wait: False returns when the state is copied to the host's memory, and goes on in a thread;
                the next ``save``, ``load`` or ``wait_for_save`` waits for it. If it fails, they or the
                next ``step`` raise its error.

        Raises:
            CheckpointError: it could not be written, on whichever rank: raised by all. What was
                complete before is as it was.
            UsageError: an extra without ``state_dict``.
        """
        path = Path(directory)
        extra = check_extras(extra)
        if names_weights_file(path):
            self._refuse_extras(path, extra)
            self._saver.save_weights(path, wait=wait)
            return
        optimizer = None if self._optimizer is None else type(self._optimizer).__name__
        steps, mesh = self.stats.steps, str(self._ranks.shape)
        manifest = Manifest(steps, self._seed, mesh, self.plan.placement, optimizer)
        self._saver.save(path, manifest, extra, wait=wait)

    def load(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        weights_only: bool = False,
    ) -> None:
        """Loads what ``save`` wrote, from any mesh and plan, before or after the first step.

        Everything is checked before anything is changed. The saved step and seed are taken, so that
        the run goes on with the same random masks. Optimizer states go by the parameters' names; the
        numbers of parameter groups (learning rates) are those that were saved.

        Args:
            directory: a checkpoint's folder, or a file of weights.
            extra: objects to give their state back, by the names they were saved under.
            weights_only: the model alone.

        Raises:
            CheckpointError: there is none, a file of it is damaged (and is named), or it does not fit
                the model, the optimizer or the extras.
        """
        path = Path(directory)
        extra = check_extras(extra)
        if names_weights_file(path):
            self._refuse_extras(path, extra)
            self._saver.load_weights(path)
            return
        manifest = self._saver.load(path, extra, weights_only=weights_only)
        if weights_only:
            return
        if manifest.seed != self._seed:
            log.warning(
                "seed %d, of the checkpoint, instead of %d: the run that was saved goes on",
                manifest.seed, self._seed,
            )  # fmt: skip
        self.stats.steps, self._seed = manifest.step, manifest.seed

    def wait_for_save(self) -> None:
        """Waits for the save under way, if there is one; called by every rank.

        Raises:
            CheckpointError: it failed.
        """
        self._saver.finish()

    def _refuse_extras(self, path: Path, extra: Mapping[str, Any]) -> None:
        if extra:
            raise UsageError(
                f"{path} is one file of weights, which holds no extras", do="name a folder"
            )

    def settings(self) -> dict[str, Any]:
        """What the step was asked to be, besides model, mesh and plan."""
        return {
            "loss": self._loss,
            "optimizer": self._optimizer,
            "micro_batches": self._micro_batches,
            "max_grad_norm": self._max_grad_norm,
            "precision": self._precision,
        }

    def report(self) -> str:
        """The plan, collectives, memory, compilations and every fallback, as text."""
        return engine_report(self.plan, self.programs, self.notes, self.stats, self._micro_batches)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
