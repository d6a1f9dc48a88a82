"""Engine: what a training script holds."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import torch_internals
from stepgraph.api import arguments
from stepgraph.api.checkpoints import SavesAndLoads
from stepgraph.api.plan import Plan, public
from stepgraph.api.replan import NOT_IN_GRAPHS, ONLY_STEPS, Replans
from stepgraph.capture.module import LossFunction, default_loss
from stepgraph.capture.refusals import check_hooks, double_backward_error
from stepgraph.errors import GraphBreakError, ParameterHookError, UsageError
from stepgraph.graphwise.compiled_autograd import NOTHING_TO_ADD, check_whole_backward
from stepgraph.graphwise.graph_breaks import GraphRunner
from stepgraph.graphwise.means import OWN_MICRO_BATCHES
from stepgraph.graphwise.parts import Parts
from stepgraph.lowering.graphs.captured import release_all
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.program import roles
from stepgraph.report.text import engine_report
from stepgraph.runtime.batches import LocalBatch, flatten_batch, in_turn, split_micro_batches
from stepgraph.runtime.checkpoints.checkpoint import Saver
from stepgraph.runtime.compiler import MAX_SHAPES, Compiled, Compiler
from stepgraph.runtime.meter import Meter
from stepgraph.runtime.ranks import join_ranks, leave_group
from stepgraph.runtime.state import State
from stepgraph.runtime.watch import watch_over
from stepgraph.torch_internals import pytree


class Engine(SavesAndLoads, Replans):
    """Compiles and runs a training step.

    Args:
        model: any ``nn.Module``, unmodified; may be on the meta device. Its parameters become DTensors
            under their own names, in place; ranks start from the first rank's values.
        loss: ``(model, batch) -> scalar``; by default ``model(**batch).loss`` or ``model(*batch)``.
        optimizer: a ``torch.optim`` instance over ``model.parameters()``; None leaves gradients in
            ``.grad``.
        mesh: ``"dp=4,tp=2"``, ``"replicate=2,shard=4"``, a DeviceMesh, or None for every rank on ``dp``.
        plan: a preset (``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hsdp``; ``tp``, ``tp+sp``, with any of
            them as ``tp+zero3``), a Plan, or the path of a plan file.
        memory: ``none``, ``full``, ``layers:N``, ``ops``; ``budget:8GiB`` a rank, or ``auto``: the fastest
            that fits; ``{"layers.*.mlp": "recompute", "optimizer": "offload"}``; None: the plan's.
        schedule: ``"none"``; None: the plan's own.
        compute_dtype: floating-point parameters and batch leaves are cast to it in the program, before
            any gather; parameters stay as they are. None: what the plan was made for.
        reduce_dtype: of gradient reductions; None: the type they are computed in.
        max_grad_norm: clips gradients to this global 2-norm, inside the program.
        micro_batches: gradient accumulation, inside the program: each rank's batch is split in so many.
        lowering: ``inductor``, ``inductor_whole`` or ``eager``; ``cuda_graph`` (``cuda_graph_eager``): what
            ``inductor`` (``eager``) makes of it, captured and replayed; None: the plan's own.
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
        memory: str | Mapping[str, str] | None = None,
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
        arguments.check_arguments(
            model, optimizer, micro_batches, schedule, compute_dtype, reduce_dtype
        )
        arguments.check_kinds(loss, mesh, plan, memory, lowering, max_grad_norm)
        check_hooks(model, optimizer)
        device = arguments.device_of(model)
        ranks = join_ranks(mesh, device)
        try:
            policies = {"memory": memory, "schedule": schedule, "lowering": lowering}
            made = arguments.make_plan(plan, ranks, model, **policies)
        except Exception:
            if ranks.owns_group:
                leave_group()
            raise
        self.model = model
        self._ranks, self._device, self._seed = ranks, device, seed
        self._optimizer = optimizer
        step = StepSettings(
            arguments.name_of(optimizer),
            micro_batches,
            max_grad_norm is not None,
            Precision(compute_dtype or made.request.step.precision.compute, reduce_dtype),
            seed,
        )
        made = made.under(step=step)
        watch = watch_over(ranks, model, made)
        self._state = State(model, optimizer, ranks, made.placement, device)
        self._saver, self._meter = Saver(self._state), Meter(device)
        kept = self._compiler = Compiler(
            self._state, loss or default_loss, made, max_grad_norm, strict, max_shapes, watch=watch
        )
        kept.capturing = Parts(kept, whole=False).closed
        self.stats, self.programs, self.notes = kept.stats, kept.programs, kept.notes
        self._graphs: GraphRunner | None = None  # where the model cannot be captured whole
        self._whole_backward = self._full_graph = False
        self._forwards = 0  # of the split use, since the last update
        if ranks.owns_group:
            atexit.register(leave_group)  # other engines may be using it until then

    @property
    def plan(self) -> Plan:
        """The Plan in force: with every program that is compiled, another one."""
        return public(self._compiler.plan)

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
        with self._compiler.call("step", local):
            return self._step(local)

    def _step(self, local: LocalBatch) -> torch.Tensor:
        pieces = split_micro_batches(local, self._compiler.settings.micro_batches)
        compiled = self._programs_of("step", local)
        if compiled is None:
            return self._step_in_graphs(pieces, local.tree)
        if self._after:
            return self._measured(compiled, local, lambda: self._run(compiled, pieces))
        return self._run(compiled, pieces)

    def _run(self, compiled: Compiled, pieces: Sequence[Sequence[Any]]) -> torch.Tensor:
        self._state.update_numbers()
        if len(pieces) > 1:
            self._state.clear_accumulators()
        results: dict[roles.Output, torch.Tensor] = {}
        for name, number, leaves in in_turn(pieces):
            self._state.seed_random_operations(self._seed, self.stats.steps, number)
            results = compiled.programs[name].run(leaves)
            compiled.values.replay()
        self._state.mark_written()
        if self._optimizer is not None:
            torch_internals.mark_stepped(self._optimizer)
        else:
            for role, _, value in compiled.programs["step"].program.output_rows:
                if isinstance(role, roles.Grad):
                    gradient = self._state.as_dtensor(results[role], value)
                    self.model.get_parameter(role.name).grad = gradient
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
        with self._compiler.call("evaluate", local):
            return self._evaluate(local)

    def _evaluate(self, local: LocalBatch) -> Any:
        compiled = self._programs_of("evaluate", local)
        if compiled is None:
            assert self._graphs is not None
            return self._graphs.evaluate(local)
        self._state.seed_random_operations(self._seed, self.stats.steps, 0)
        results = compiled.programs["evaluate"].run(local.leaves)
        compiled.values.replay()
        leaves = {r.index: v for r, v in results.items() if isinstance(r, roles.UserOutput)}
        return compiled.results.rebuild(leaves)

    def _programs_of(self, entry: str, batch: LocalBatch) -> Compiled | None:
        """The programs of an entry point; None where the model is run graph by graph."""
        if self._graphs is None:
            try:
                return self._compiler.entry(entry, batch)
            except (GraphBreakError, ParameterHookError) as error:
                if self._full_graph:
                    raise
                self._compiler.goes_graph_by_graph(entry, error)
                self._graphs = GraphRunner(
                    self._compiler, self._compiler.loss, error, self._whole_backward
                )
        self._graphs.agree(entry, batch)
        return None

    def graph_by_graph(self, batch: Any = None) -> GraphRunner | None:
        """What runs a model that cannot be captured whole; None where it is, or has not been tried.

        Args:
            batch: this rank's part of one, to try it with.
        """
        if self._graphs is None and batch is not None:
            self._programs_of("step", flatten_batch(batch, self._device))
        return self._graphs

    def _step_in_graphs(
        self, pieces: Sequence[Sequence[Any]], tree: pytree.TreeSpec
    ) -> torch.Tensor:
        assert self._graphs is not None
        self._not_measured(NOT_IN_GRAPHS)
        if len(pieces) > 1:
            self._compiler.report([OWN_MICRO_BATCHES])
        self.model.zero_grad()
        losses = []
        for leaves in pieces:
            loss = self._graphs.loss("step", leaves, tree)
            self.backward(loss / len(pieces))
            losses.append(loss.detach())
        if self._optimizer is not None:
            self.optimizer_step()
        else:
            self.stats.steps += 1
        return torch.stack(losses).mean()

    def warm_up(self, batch: Any, evaluate: bool = True) -> float:
        """Compiles ``step``, and ``evaluate``, for batches like this one, and runs neither.

        What is compiled is kept on disk as well: other processes that train the same find it there. Graphs
        of a model that runs graph by graph are compiled when they first run.

        Args:
            batch: this rank's part of one; every rank brings one.
            evaluate: compile the evaluation too.

        Returns:
            the seconds it took.
        """
        start = time.perf_counter()
        local = flatten_batch(batch, self._device)
        for entry in ("step", "evaluate")[: 1 + evaluate]:
            with self._compiler.call(f"warm_up of {entry}", local):
                if self._programs_of(entry, local) is None:
                    break
        return time.perf_counter() - start

    # -- the split use

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of one process on the global batch, carrying a graph.

        Args:
            batch: this rank's part.

        Raises:
            UsageError: the engine splits batches into micro-batches: that is what ``step`` does.
        """
        if self._compiler.settings.micro_batches > 1:
            raise UsageError(
                f"the split use takes one batch, not micro_batches={self._compiler.settings.micro_batches}",
                do="call engine(batch) and engine.backward(loss) several times, or engine.step(batch)",
            )
        self._saver.check()
        local = flatten_batch(batch, self._device)
        with self._compiler.call("gradients", local):
            return self._forward(local)

    def _forward(self, local: LocalBatch) -> torch.Tensor:
        compiled = self._programs_of("gradients", local)
        if compiled is None:
            assert self._graphs is not None
            return self._graphs.loss("gradients", local.leaves, local.tree)
        if self._whole_backward:
            self._compiler.report([NOTHING_TO_ADD], falls_back=False)
        split = compiled.split
        assert split is not None
        self._state.seed_random_operations(self._seed, self.stats.steps, self._forwards)
        self._forwards += 1
        (loss,) = split.run(local.leaves)
        compiled.values.replay()
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a loss to ``.grad``: DTensors, reduced over ranks.

        Args:
            loss: what ``engine(batch)`` returned, or something computed from it.

        Raises:
            CaptureError: a gradient of a gradient, of a model that runs graph by graph.
        """
        try:
            loss.backward()
        except RuntimeError as error:
            if (clear := double_backward_error(error)) is None:
                raise
            raise clear from error

    def optimizer_step(self) -> None:
        """Clips, updates, then sets ``.grad`` to None; parameters without one are left alone.

        Raises:
            UsageError: no optimizer, or no gradient at all.
        """
        if self._optimizer is None:
            raise UsageError(
                "this engine has no optimizer", do="give it one, or step your own over .grad"
            )
        named = self.model.named_parameters()
        given = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
        if not given:
            raise UsageError(
                "no parameter has a gradient", do="call engine.backward(engine(batch)) before"
            )
        with self._compiler.call("optimizer_step"):
            update = self._compiler.update(list(given))
            self._state.update_numbers()
            update.run((), self._state.own_parts(given, update.program))
        self._state.mark_written()
        self.model.zero_grad()
        torch_internals.mark_stepped(self._optimizer)
        self.stats.steps += 1
        self._forwards = 0
        self._not_measured(ONLY_STEPS)

    def compile(
        self,
        backend: str = "inductor",
        compiled_autograd: bool = False,
        compiled_autograd_enabled: bool | None = None,
        fullgraph: bool = False,
        **options: Any,
    ) -> None:
        """How the split use runs from here on, and every step of a model that is run graph by graph.

        Args:
            backend: a lowering.
            compiled_autograd: the whole backward of a model with graph breaks is one graph. (That of a
                model without is one in any case.)
            compiled_autograd_enabled: DeepSpeed's name for it.
            fullgraph: a graph break is an error.

        Raises:
            UsageError: an unknown backend; another option of ``torch.compile``; compiled autograd where
                torch has none.
        """
        self._whole_backward = arguments.check_compile(
            backend, compiled_autograd, compiled_autograd_enabled, options
        )
        self._full_graph = fullgraph
        if self._whole_backward:
            check_whole_backward()
        self._compiler.change_lowering(backend)
        if self._graphs is not None:
            self._graphs.change(backend, self._whole_backward)

    # -- what it is

    def model_as_given(self) -> AbstractContextManager:
        """Within it modules have their own classes, whose parts cannot be called on their own."""
        return self._compiler.capturing()

    def settings(self) -> dict[str, Any]:
        """What the step was asked to be, besides model, mesh and plan."""
        return {
            "loss": self._compiler.loss,
            "optimizer": self._optimizer,
            "max_grad_norm": self._compiler.max_grad_norm,
        }

    def close(self) -> None:
        """Lets go of captured graphs, before a process group that is the caller's is destroyed."""
        release_all()

    def report(self) -> str:
        """The plan, collectives, memory, compilations and every fallback, as text."""
        return engine_report(self.plan, self.programs, self.notes, self.stats)
