"""The road for modules that cannot be captured whole: forward and backward, graph after graph.

dynamo runs the user's Python and hands each piece that it can capture to the backend; what it cannot runs
as it stands. Parameters enter both through markers, so both are right. The plan is one for all graphs.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from stepgraph import torch_internals
from stepgraph.analysis.sums import OWN_NUMBERS, OWN_SUMS
from stepgraph.capture.loss import check_loss, forgotten_loss, loss_of
from stepgraph.capture.mixed_types import mixed_types_error
from stepgraph.capture.module import default_loss, in_dtype
from stepgraph.capture.refusals import check_assigned_data, check_hooks
from stepgraph.errors import CaptureError, PlanError, StepgraphError, UsageError
from stepgraph.graphwise.backend import Backend
from stepgraph.graphwise.buffers_of_ranks import BuffersOfRanks
from stepgraph.graphwise.compiled_autograd import WholeBackward
from stepgraph.graphwise.graph_compiler import GraphCompiler
from stepgraph.graphwise.means import mean_over_ranks
from stepgraph.graphwise.of_all_ranks import OfAllRanks
from stepgraph.graphwise.parts import MIXED
from stepgraph.graphwise.rows_by_data import RowsByData
from stepgraph.graphwise.sharded_modules import Gathering, gather_where_read
from stepgraph.placement.presets.named import for_own_update, stored_parameter
from stepgraph.program import roles
from stepgraph.program.markers import UNSHARD
from stepgraph.program.mesh_roles import Role
from stepgraph.program.program import Value
from stepgraph.runtime.batches import LocalBatch, flatten_with_paths, index_error
from stepgraph.runtime.compiler import Compiler
from stepgraph.runtime.executor import CHANGED_BETWEEN
from stepgraph.runtime.modes import evaluation_mode
from stepgraph.runtime.progress import doing
from stepgraph.runtime.recompiles import before_compiling, count_call
from stepgraph.torch_internals import graphs as dynamo
from stepgraph.torch_internals import namespaces, pytree
from stepgraph.torch_internals.modules import look_at

log = logging.getLogger("stepgraph")

# How often a piece of code may be compiled for one kind of batch: in training, in evaluation, for layers
# that differ in a number. dynamo runs it as Python from then on.
VARIANTS = 8
PLACEMENTS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")


class GraphRunner:
    """Runs a callable over a module graph by graph, on sharded parameters.

    Args:
        compiler: of the module; it has the plan, the ranks, the state and the statistics.
        function: what is captured, graph by graph.
        reason: why it could not be captured whole.
        whole_backward: a backward is one graph.

    Raises:
        StrictError: under ``strict=True``.
        PlanError: a plan that needs the whole.
    """

    def __init__(
        self, compiler: Compiler, function: Callable, reason: StepgraphError, whole_backward: bool
    ) -> None:
        self.compiler = compiler
        plan, ranks = compiler.plan, compiler.ranks
        if plan.placement not in PLACEMENTS or ranks.shape.roles != (Role.DATA,):
            first = plan.first_placed()
            raise PlanError(
                f"the plan {plan.placement!r} on mesh {ranks.shape} needs a model that is captured whole"
                + (f": the first value that it places is {first}" if first else ""),
                where=reason.where,
                why="what follows a graph break has this rank's rows, and whole of everything else: "
                f"{plan.placement!r} would have the value that crosses it in other parts",
                do="remove the graph break, or use ddp or a zero stage on a mesh of dp alone",
            ) from reason
        because = reason.where or ": ".join(filter(None, (reason.what, reason.why)))
        compiler.report([f"captured graph by graph, because of {because}"])
        plan = compiler.plan = plan.under(placement=for_own_update(plan.placement))
        self._store_parameters()
        ((mesh_dim, size),) = ranks.shape.dims
        self._group = ranks.groups.get(mesh_dim, "")
        precision = compiler.settings.precision
        dtypes = precision.compute, precision.reduce
        self._gathering = Gathering(size, self._group, mesh_dim, *dtypes)
        with compiler.capturing():
            gather_where_read(compiler.model, self._gathering)
        self.graphs = GraphCompiler(
            plan.request, ranks.target, ranks.rank, ranks.groups, watch=compiler.watch
        )
        self._function, self._entry = function, ""
        # What modules hold before there is a batch is no rows of one.
        held = pytree.tree_leaves([dict(vars(module)) for module in compiler.model.modules()])
        # Parameters are told by their markers; a reference to one would keep it from being converted.
        tensors = [x for x in held if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
        self.graphs.known.update((x, Replicate()) for x in tensors)
        self._buffers = BuffersOfRanks(
            compiler.model, size, self._group, ranks.rank, self.graphs.known, compiler.report
        )
        self._of_all_ranks = OfAllRanks(
            size, self._group, compiler.state.device, self.graphs.known, compiler.report
        )
        self._hooks = look_at(compiler.model).forward_hooks
        self._by_data = RowsByData(size, compiler.watch, compiler.report)
        self._gathering.reads = self._by_data.reads
        self._warm: set[str] = set()
        self._met = self._was_warm = False
        self._codes: set = set()
        self._backends: list[Backend] = []
        self._modes: set[weakref.ref] = set()
        weakref.finalize(self, dynamo.drop_compiled, self._codes, self._backends, self._modes)
        self._whole: WholeBackward | None = None
        self._compiled = self._compile()
        self._by_hooks = {self._hooks: self._compiled}
        self.change(plan.lowering, whole_backward)

    def _compile(self) -> Callable:
        limit = self.compiler.max_shapes * VARIANTS
        return dynamo.compile_apart(self._function, self._backend(False), limit, False)

    def _backend(self, backward: bool) -> Backend:
        self._backends.append(Backend(self, backward))
        return self._backends[-1]

    def change(self, lowering: str, whole_backward: bool) -> None:
        """How graphs are lowered from here on, and whether a backward is one graph."""
        if lowering != self.graphs.request.lowering:
            self.graphs.request = replace(self.graphs.request, lowering=lowering)
            self._compiled = self._compile()
            self._by_hooks = {self._hooks: self._compiled}
            self._whole = None
        if not whole_backward:
            self._whole = None
        elif self._whole is None:
            self._whole = WholeBackward(self._backend(True), self.compiler.max_shapes)

    def _store_parameters(self) -> None:
        """As this road wants them stored: zero1 and zero2 keep parts, too."""
        state, ranks = self.compiler.state, self.compiler.ranks
        for name, parameter in self.compiler.model.named_parameters():
            assert isinstance(parameter, DTensor)
            shape = tuple(parameter.shape)
            stored = stored_parameter(self.compiler.plan.placement, shape, ranks.shape)
            state.store_as(roles.Param(name), Value(shape, parameter.dtype, stored))

    def agree(self, entry: str, batch: LocalBatch) -> None:
        """Makes sure that the model is as it was planned, and that all ranks bring batches of one kind.

        Raises:
            BatchError, ShapeLimitError: of :meth:`KindsOfBatch.meet`.
            HookError, UsageError: the model was changed so that it cannot run as planned.
        """
        if self._met:  # the call that brought the model here is counted
            count_call(self.compiler, entry)
        self._met, self._was_warm = True, entry in self._warm
        check_hooks(self.compiler.model, self.compiler.optimizer)
        for name, parameter in self.compiler.model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise UsageError(
                    f"parameter {name!r} came to the model after it was placed: its gradient would be "
                    "this rank's own",
                    do="change the model before it is given to stepgraph",
                )
        self.compiler.state.adopt_parameters()
        self.compiler.checks.data.check()
        self.compiler.kinds.meet(entry, batch)

    def _follow_hooks(self, entry: str) -> None:
        """dynamo does not look whether modules have other forward hooks than when it captured them."""
        now = look_at(self.compiler.model).forward_hooks
        if now == self._hooks:
            return
        reason = f"{entry}: forward hooks changed"
        if entry in self._warm:
            before_compiling(self.compiler, entry, reason)
        self.compiler.stats.recompiles.append(reason)
        if now not in self._by_hooks:
            while len(self._by_hooks) > 1:  # what was before hooks came is kept, they tend to go
                self._by_hooks.popitem()
            self._by_hooks[now] = self._compile()
        self._hooks, self._compiled = now, self._by_hooks[now]
        self._warm.clear()

    def run(self, entry: str, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Any:
        """What the callable returns for this rank's part of a batch.

        Args:
            entry: the entry point that asks, for its statistics.
        """
        compute = self.compiler.settings.precision.compute
        cast = [in_dtype(x, compute) if isinstance(x, torch.Tensor) else x for x in leaves]
        tensors = [x for x in cast if isinstance(x, torch.Tensor)]
        self.graphs.rows = next((x.shape[0] for x in tensors if x.dim()), 0)
        self.graphs.known.update((x, Shard(0) if x.dim() else Replicate()) for x in tensors)
        pairs, _ = flatten_with_paths(pytree.tree_unflatten(list(leaves), tree))
        self._entry, self.graphs.evaluates = entry, entry == "evaluate"
        self.graphs.guessed, self._of_all_ranks.rows = False, self.graphs.rows
        self._follow_hooks(entry)
        self._buffers.make_alike_if_due()
        before, self._gathering.active = self._gathering.active, True
        read = dynamo.graphs_ended(dynamo.BY_NUMBERS)
        try:
            run = self._function if self._by_data.found else self._compiled
            looking = self._by_data.looking()
            finding = namespaces.found_where_they_are()
            with self.compiler.capturing(), dynamo.running_regions_once(), finding, looking:
                result = run(self.compiler.model, pytree.tree_unflatten(cast, tree))
            self._warm.add(entry)
            several = self.compiler.ranks.shape.data_size > 1
            returned = pytree.tree_leaves(result)
            left = self.graphs.known.sums_left(returned)
            made = self.graphs.guessed or any(map(self._of_all_ranks.is_rows_by_shape, returned))
            if several and dynamo.graphs_ended(dynamo.BY_NUMBERS) > read:
                self.compiler.report([OWN_NUMBERS])
            elif several and left and made:  # rows that code made, perhaps of those sums
                self.compiler.report([OWN_SUMS])
            self._buffers.changed()
            self.compiler.report(self.graphs.notes)
            return result
        except torch_internals.DynamoError as error:
            inner = dynamo.inner_error(error)
            if isinstance(inner, StepgraphError):
                raise inner from inner.__cause__
            if MIXED in str(error):
                raise CaptureError(
                    "code of the model reads a parameter in parts",
                    where=str(error).partition("from user code:")[2].strip() or None,
                    do="read parameters as attributes of their modules: parameters() and _parameters hold "
                    "DTensors, parts of which each rank has",
                ) from error
            if (mixed := mixed_types_error(error, compute)) is not None:
                raise mixed from error
            raise
        except TypeError as error:
            if self._function is not default_loss:
                raise
            raise forgotten_loss(error) from error
        except (RuntimeError, IndexError) as error:
            clear = mixed_types_error(error, compute) or index_error(error, pairs)
            if clear is None:
                raise
            raise clear from error
        finally:
            self._gathering.active = before

    def record(self, backend: Callable, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
        """One forward and backward whose graphs another backend runs; nothing that it changes stays.

        Args:
            backend: what dynamo hands graphs to; its ``graphs`` follow how ranks have values.
        """
        model, tensors = self.compiler.model, [x for x in leaves if isinstance(x, torch.Tensor)]
        follower = backend.graphs  # type: ignore[attr-defined]
        follower.rows = next((x.shape[0] for x in tensors if x.dim()), 0)
        follower.known.update((x, Shard(0) if x.dim() else Replicate()) for x in tensors)
        gradients = [(p, p.grad) for p in model.parameters()]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        run = dynamo.compile_apart(self._function, backend, self.compiler.max_shapes, False)
        before, self._gathering.active = self._gathering.active, True
        try:
            finding, drawing = namespaces.found_where_they_are(), torch.random.fork_rng(devices=[])
            with self.compiler.capturing(), finding, drawing:
                loss_of(run(model, pytree.tree_unflatten(list(leaves), tree))).backward()
        finally:
            self._gathering.active = before
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def loss(self, entry: str, leaves: Sequence[Any], tree: pytree.TreeSpec) -> torch.Tensor:
        """The loss, carrying a graph: the mean over data-parallel ranks."""
        loss = loss_of(self.run(entry, leaves, tree))
        check_loss(loss, not torch.is_grad_enabled() or loss.requires_grad)
        return self.handed_out(self.mean(self._of_all_ranks.loss(loss), entry))

    def results(self, entry: str, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Any:
        """What the module returns: this rank's rows, and the loss, carrying a graph, as in :meth:`loss`."""

        def of_all_ranks(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.dim() or not x.requires_grad:
                return x
            return x if self.graphs.known[x] is None else self.mean(self._of_all_ranks.loss(x))

        result = self.run(entry, leaves, tree)
        if entry == "evaluate":
            result = self._agreed(result, gathers=False)
        return self.handed_out(pytree.tree_map(of_all_ranks, result))

    def evaluate(self, batch: LocalBatch) -> Any:
        """What the callable returns for the global batch, in evaluation mode."""
        with evaluation_mode(self.compiler.model), torch.no_grad():
            result = self.run("evaluate", batch.leaves, batch.tree)
        self._buffers.make_alike_if_due()
        return self._agreed(result, gathers=True)

    def _agreed(self, result: Any, gathers: bool) -> Any:
        """What an evaluation returned, as one process would have it; rows only where they are gathered.

        Raises:
            RanksDifferError: ranks ran other graphs, or returned other things.
        """
        if self.compiler.ranks.shape.data_size == 1:
            return result
        leaves, tree_of = pytree.tree_flatten(result)
        if self.compiler.watch is not None:
            kinds = [(x.dim(), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in leaves]
            self.compiler.watch.runs(zlib.crc32(repr(kinds).encode()))
            self.mean(torch.zeros((), device=self.compiler.state.device), "evaluate")
        return pytree.tree_unflatten(self._of_all_ranks.results(leaves, gathers), tree_of)

    def handed_out(self, result: Any) -> Any:
        """What a caller gets: a backward from it is an error if a parameter behind it was written since."""
        leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        read = dynamo.leaves_behind(leaves)
        if self._whole is not None and not self._by_data.found:
            result = self._whole.start_from(result, read)
        self._buffers.follow(result)

        def versions() -> list[int]:
            return [parameter._version for parameter in read]

        before = versions()

        def check(gradient: torch.Tensor) -> None:
            if versions() != before:
                raise RuntimeError(CHANGED_BETWEEN)

        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(check)
        return result

    def mean(self, value: torch.Tensor, entry: str = "") -> torch.Tensor:
        """The mean over data-parallel ranks of a value that each has; gradients pass as they are.

        Raises a RanksDifferError where they ran other graphs to come to it, in this call of ``entry``.
        """
        watch = self.compiler.watch if entry else None
        word = None if watch is None else watch.word()
        if watch is not None:
            watch.runs(0)  # who waits here has come further than who waits for a parameter
        mean, same = mean_over_ranks(value, self._group, self.compiler.ranks.shape.data_size, word)
        if watch is not None and not same:
            raise watch.differ(f"{entry} runs other graphs on some ranks than on others")
        return mean

    def compile(self, graph: torch.fx.GraphModule, examples: Any, backward: bool) -> Callable:
        """Compiles a graph that dynamo captured, of the model or (``backward``) of its whole backward."""
        check_assigned_data(graph, UNSHARD)
        if (code := dynamo.code_now()) is not None:
            self._codes.add(code)
        if (mode := dynamo.fake_mode_now()) is not None:
            self._modes.add(weakref.ref(mode))
        if self._by_data.met() and not backward:
            return self._by_data.as_it_stands(graph)
        # The first call of an entry point is its own warm-up, whatever others have compiled before.
        reason = dynamo.recompilation_reason() if self._entry in self._warm else None
        if reason is None and backward and self._was_warm:
            reason = "the whole backward, for the first time"
        if reason is not None:
            before_compiling(self.compiler, self._entry, reason)
        seen, made = len(self.graphs.notes), len(self.graphs.programs)
        with self.compiler.stats.counting(f"{self._entry}: {reason}" if reason else None):
            try:
                with doing(f"compiling graph {made + 1} of {self._entry}"):
                    compiled = self.graphs(graph, examples, backward)
            except torch_internals.GRAPH_BREAKS as error:
                if isinstance(error, torch_internals.SIZE_BY_DATA) and not backward:
                    self._by_data.find()
                    return self._by_data.as_it_stands(graph)
                # dynamo would run it uncompiled, in silence
                raise CaptureError(
                    "a graph of the model cannot be compiled",
                    why=f"{type(error).__name__}: {error}",
                ) from error
        self.compiler.report(self.graphs.notes[seen:])
        for number, program in enumerate(self.graphs.programs[made:], made):
            key, decided = f"graph {number}", self.graphs.decided[number]
            self.compiler.programs[key] = program
            self.compiler.plan = self.compiler.plan.with_decisions(key, decided)
        return compiled
