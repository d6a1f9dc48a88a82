"""parallelize(): sharded parameters and compiled programs under the user's own loop and optimizer."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stepgraph import torch_internals
from stepgraph.api import arguments
from stepgraph.capture.module import LossFunction
from stepgraph.capture.refusals import check_hooks
from stepgraph.errors import BatchError, GraphBreakError, ParameterHookError, UsageError
from stepgraph.graphwise.compiled_autograd import check_whole_backward
from stepgraph.graphwise.graph_breaks import GraphRunner
from stepgraph.graphwise.parts import Parts
from stepgraph.placement.presets.named import for_own_update
from stepgraph.planning.plan import Plan
from stepgraph.planning.request import Precision, StepSettings
from stepgraph.program import roles
from stepgraph.runtime.batches import LocalBatch, flatten_batch
from stepgraph.runtime.call_numbers import CallNumbers
from stepgraph.runtime.compiler import MAX_SHAPES, Compiled, Compiler
from stepgraph.runtime.ranks import join_ranks
from stepgraph.runtime.replay import Replay, can_be_replayed, flat_batch
from stepgraph.runtime.state import State
from stepgraph.runtime.watch import watch_over
from stepgraph.torch_internals import pytree
from stepgraph.torch_internals.python_changes import has_written_modules

HOW_TO_FILL = (
    "before the first call: model.to_empty(device=...), then what fills it in place, as the model's own "
    "init_weights() does; or torch.distributed.checkpoint's set_model_state_dict"
)


def parallelize(
    model: nn.Module,
    *,
    example: Any,
    mesh: str | DeviceMesh | None = None,
    plan: str | Path | Plan = "zero3",
    loss: LossFunction | None = None,
    memory: str | Mapping[str, str] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    lowering: str | None = None,
    strict: bool = False,
    seed: int = 0,
    max_shapes: int = MAX_SHAPES,
    compiled_autograd: bool = False,
) -> nn.Module:
    """Shards a module in place and compiles its forward and backward; the loop stays the user's.

    Calls take this rank's part of the batch and return this data-parallel rank's part of the results,
    whole over ``tp``; a scalar is that of the global batch. Gradients arrive in ``.grad`` as DTensors,
    reduced: of what is this rank's own, averaged over data-parallel ranks as DDP does; of what is global,
    exact. An input that requires a gradient gets its own rows' as under DDP: that of this rank's own loss.
    A cache of keys and values among the results is left out.

    Args:
        model: a plain module, or one on the meta device that is filled afterwards; its parameters become
            DTensors under their own names. Build the optimizer afterwards, over ``model.parameters()``.
        example: a batch of the *global* shape: a mapping is passed as keywords, a tuple as arguments.
        mesh, plan, memory, compute_dtype, reduce_dtype, lowering, strict, seed: as for Engine. ``zero1``
            and ``zero2`` store parameters sharded, so that the optimizer's state is, gather them once per
            forward and keep them for the backward.
        loss: ``(model, batch) -> scalar``; calls then take a batch and return the global batch's loss.
        max_shapes: distinct batch shapes to keep compiled programs for.
        compiled_autograd: the whole backward of a module with graph breaks is one graph.

    Returns:
        the same module.

    Raises:
        UsageError, MeshError, CaptureError: before or while the first program is made.
    """
    if isinstance(model, nn.Module) and "forward" in vars(model):
        raise UsageError(
            "the module's forward has been replaced already",
            do="parallelize a module once, and before anything else wraps its forward",
        )
    arguments.check_arguments(model, None, 1, None, compute_dtype, reduce_dtype)
    arguments.check_kinds(loss, mesh, plan, memory, lowering, None)
    check_hooks(model)
    device = arguments.device_of(model)
    ranks = join_ranks(mesh, device)
    made = arguments.make_plan(plan, ranks, model, memory=memory, lowering=lowering)
    precision = Precision(compute_dtype or made.request.step.precision.compute, reduce_dtype)
    step = StepSettings(precision=precision, seed=seed)
    made = made.under(placement=for_own_update(made.placement), step=step)
    watch = watch_over(ranks, model, made)
    state = State(model, None, ranks, made.placement, device)
    run, as_module = loss or _call_model, loss is None
    state.how_to_fill = HOW_TO_FILL
    compiler = Compiler(
        state, run, made, strict=strict, max_shapes=max_shapes, as_module=as_module, watch=watch
    )
    compiler.needs_values = False
    if compiled_autograd:
        check_whole_backward()
    forward = ParallelForward(compiler, seed, compiled_autograd)
    forward.compile(example)
    _check_complex(model)
    model.forward = forward  # type: ignore[method-assign]
    return model


def _check_complex(model: nn.Module) -> None:
    """Raises UsageError for a parameter that the user's optimizer would leave as it is, in silence."""
    for name, parameter in model.named_parameters():
        if not (isinstance(parameter, DTensor) and parameter.is_complex()):
            continue
        for place, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(place, Shard) and parameter.shape[place.dim] % ranks:
                raise UsageError(
                    f"the complex parameter {name!r} {tuple(parameter.shape)} does not divide over "
                    f"{ranks} ranks",
                    why="torch's Adam and its like do not write to such a DTensor (torch 2.13)",
                    do="plan='ddp', a length that divides, or stepgraph.Engine, which updates by itself",
                )


def _call_forward(model: nn.Module, batch: Any) -> Any:
    args, kwargs = batch
    return model.forward(*args, **kwargs)


def _call_model(model: nn.Module, batch: Any) -> Any:
    result = _call_forward(model, batch)  # the module's own hooks run around what is compiled
    if isinstance(result, dict):
        kept = {k: v for k, v in result.items() if not hasattr(v, "get_seq_length")}
        if len(kept) < len(result):  # a cache of keys and values: training has no use for it
            result = type(result)(**kept)
    # A result that is a view of another, of an input or of a parameter becomes a value of its own.
    return pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result
    )


class ParallelForward:
    """What a parallelized module runs in place of its ``forward``.

    ``compiler`` has the plan, the programs, the notes and the statistics.
    """

    def __new__(cls, *args: Any) -> ParallelForward:
        """One of a class of its own: dynamo keeps few compilations of one piece of code."""
        call = cls.__call__
        own = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__)
        return super().__new__(type(cls.__name__, (cls,), {"__call__": own}))  # type: ignore[arg-type]

    def __init__(self, compiler: Compiler, seed: int, whole_backward: bool) -> None:
        self.compiler, self.seed, self.whole_backward = compiler, seed, whole_backward
        self.graphs: GraphRunner | None = None  # where the module cannot be captured whole
        self.parts = Parts(compiler, whole=True)
        self._numbers = CallNumbers()
        compiler.capturing = self._own_forward
        self.replays: list[Replay] = []
        self.modules = list(compiler.model.modules())

        @torch.compiler.assume_constant_result  # called while torch.compile traces; not in its graph
        def prepare_replays() -> int:
            return self._prepare_replays()

        self.prepare_replays = prepare_replays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on this rank's part of a batch; under torch.compile its programs are part of the graph."""
        if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            paths, leaves = flat_batch(self._batch(args, kwargs))
            self.prepare_replays()
            modes = tuple([module.training for module in self.modules])
            trained = tuple([parameter.requires_grad for parameter in self.compiler.parameters])
            for replay in self.replays:
                if replay.is_for(modes, trained, paths, leaves):
                    return replay.run(leaves)
        return self._call(args, kwargs)

    def _prepare_replays(self) -> int:
        """Of all that was compiled for training and may run now."""
        known, self.replays = self.replays, []
        if self.graphs is not None or has_written_modules():  # reads of those are not what they are
            return 0
        for key, compiled in self.compiler.made_for("gradients"):
            replay = next((one for one in known if one.compiled is compiled), None)
            if replay is None and can_be_replayed(key, compiled):
                begin = functools.partial(self._begin, key, compiled)
                replay = Replay(key, compiled, begin, self.compiler.as_module)
            self.replays += [] if replay is None else [replay]
        return len(self.replays)

    def _begin(self, key: tuple, compiled: Compiled) -> None:
        """Before each call that torch.compile has traced."""
        self.compiler.check_again("gradients", key, compiled)
        number = self._numbers.take(compiled.draws)
        self.compiler.state.seed_random_operations(self.seed, number, 0)
        compiled.values.replay()

    @torch_internals.disable_compiler  # what runs is compiled: torch.compile would bind it once more
    def _call(self, args: Any, kwargs: Any) -> Any:
        compiler, state = self.compiler, self.compiler.state
        local = flatten_batch(self._batch(args, kwargs), state.device)
        training = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*local.tensors, *state.model.parameters())
        )
        training = training or not compiler.as_module  # a given loss is the loss in any mode
        with compiler.call("gradients" if training else "evaluate", local):
            return self._run(local, training)

    def _run(self, local: LocalBatch, training: bool) -> Any:
        compiler, state = self.compiler, self.compiler.state
        compiled = self._programs_of("gradients" if training else "evaluate", local)
        state.check_filled()
        if compiled is None:
            return self._run_in_graphs(local, training)
        counts = training or compiled.draws
        number = self._numbers.take(compiled.draws) if counts else self._numbers.next
        state.seed_random_operations(self.seed, number, 0)
        if training:
            assert compiled.split is not None
            results = compiled.split.run(local.leaves)
            compiled.values.replay()
            if not compiler.as_module:
                return results[0]
            found = dict(zip(compiled.split.results, results, strict=True))
        else:
            found = compiled.programs["evaluate"].run(local.leaves)
            compiled.values.replay()
        leaves = {r.index: v for r, v in found.items() if isinstance(r, roles.ModuleResult)}
        return compiled.results.rebuild(leaves)

    def compile(self, example: Any) -> None:
        """Compiles for a batch of a global shape; nothing runs."""
        ranks = self.compiler.ranks.shape.data_size

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim():
                return leaf
            if leaf.shape[0] % ranks:
                raise BatchError(
                    f"the example has {leaf.shape[0]} rows, which do not divide over {ranks} ranks",
                    do="give an example of the global batch",
                )
            return torch.empty_like(
                leaf[: leaf.shape[0] // ranks], device=self.compiler.state.device
            )

        several = tuple(example) if isinstance(example, (tuple, list)) else (example,)
        batch = self._batch((), example) if isinstance(example, dict) else self._batch(several, {})
        local = flatten_batch(pytree.tree_map(part, batch), self.compiler.state.device)
        self._programs_of("gradients", local)

    def _programs_of(self, entry: str, batch: LocalBatch) -> Compiled | None:
        """The programs of an entry point; None where the module is run graph by graph."""
        if self.graphs is None:
            try:
                return self.compiler.entry(entry, batch)
            except (GraphBreakError, ParameterHookError) as error:
                self.compiler.goes_graph_by_graph(entry, error)
                function = _call_forward if self.compiler.as_module else self.compiler.loss
                with self._own_forward():
                    self.graphs = GraphRunner(self.compiler, function, error, self.whole_backward)
        self.graphs.agree(entry, batch)
        return None

    def _run_in_graphs(self, batch: LocalBatch, training: bool) -> Any:
        assert self.graphs is not None
        entry = "gradients" if training else "evaluate"
        with self._own_forward(), torch.set_grad_enabled(torch.is_grad_enabled() or training):
            if self.compiler.as_module:
                return self.graphs.results(entry, batch.leaves, batch.tree)
            return self.graphs.loss(entry, batch.leaves, batch.tree)

    def _batch(self, args: tuple, kwargs: dict) -> Any:
        if self.compiler.as_module:
            return args, kwargs
        if len(args) == 1 and not kwargs:
            return args[0]
        return kwargs if kwargs and not args else args

    @contextlib.contextmanager
    def _own_forward(self) -> Iterator[None]:
        """The module's own forward and classes, which are what is captured."""
        model = self.compiler.model
        replaced = vars(model).pop("forward", None)
        try:
            with self.parts.closed():
                yield
        finally:
            if replaced is not None:
                model.forward = replaced  # type: ignore[method-assign]
