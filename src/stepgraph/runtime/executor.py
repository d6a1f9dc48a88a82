"""Compiled entry points: programs lowered for this rank, and the tensors that go in and out.

Of the split use, forward and backward are two calls, with the caller's own autograd graph between them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Shard

from stepgraph import torch_internals
from stepgraph.errors import UsageError
from stepgraph.lowering.apply import lower
from stepgraph.lowering.graphs.captured import Graphed
from stepgraph.lowering.partition import forward_and_backward
from stepgraph.lowering.record import Executable
from stepgraph.pipeline import executed
from stepgraph.planning.decisions import LoweringDecision
from stepgraph.program import roles
from stepgraph.program.copies import is_on_host
from stepgraph.program.driver import PassDriver
from stepgraph.program.mesh_roles import role_of
from stepgraph.program.program import Program, Value
from stepgraph.runtime.batches import index_error
from stepgraph.runtime.state import State


@dataclass
class LoweredProgram:
    """One program, ready to run on this rank.

    ``arguments`` are its inputs in order, the places of what each call brings left open: ``places`` are
    (position among the arguments, role). ``buffers`` are those among the arguments. ``away``: positions of
    those that wait in the host's memory. ``after``: called once it has run.
    """

    program: Program
    execute: Executable
    arguments: list[Any]
    places: list[tuple[int, roles.Input]]
    outputs: list[roles.Output]
    buffers: dict[str, torch.Tensor]
    away: frozenset[int] = frozenset()
    after: Callable[[], None] = lambda: None

    def held(self, away: bool = False) -> list[torch.Tensor]:
        """What it takes that outlives a call: of the device's memory, or what is ``away`` on the host."""
        pairs = enumerate(self.arguments)
        return [one for i, one in pairs if one is not None and (i in self.away) == away]

    def release(self) -> None:
        """Lets go of the tensors that it takes, and of captured graphs; it cannot run again."""
        self.arguments.clear()
        if isinstance(self.execute, Graphed):
            self.execute.release()

    def run(
        self, leaves: Sequence[Any] = (), brought: Mapping[roles.Input, torch.Tensor] | None = None
    ) -> dict[roles.Output, torch.Tensor]:
        """Runs on one (micro-)batch; state is updated in place, what remains is returned.

        ``brought``: what else the call brings: tangents, gradients, saved values.
        """
        arguments = list(self.arguments)
        # Programs are compiled for contiguous inputs; what a caller brings may be any view.
        for position, role in self.places:
            of_batch = isinstance(role, roles.UserInput)
            value = leaves[role.index] if of_batch else (brought or {})[role]
            saved = isinstance(role, roles.Saved)  # by a program, with the strides that it promised
            arguments[position] = value if saved else value.contiguous()
        try:
            found = dict(zip(self.outputs, self.execute(arguments), strict=True))
            self.after()
            return found
        except (RuntimeError, IndexError) as error:
            given = [role for _, role in self.places if isinstance(role, roles.UserInput)]
            named = ((role.name, leaves[role.index]) for role in given if role.index < len(leaves))
            if (clear := index_error(error, named)) is None:
                raise
            raise clear from error


def lower_for_rank(
    program: Program, decision: LoweringDecision, state: State, driver: PassDriver, in_two: bool
) -> list[LoweredProgram]:
    """Lowers a bound Program for this rank; ``in_two``: forward and backward each by itself.

    The Program that is passed in stays as it is: it is what ``engine.programs`` shows.
    """
    final = executed(program, decision.name, state.ranks.groups, driver)
    sides = forward_and_backward(final) if in_two else [final]
    return [_lowered(program, side, decision, state) for side in sides]


def _lowered(
    program: Program, final: Program, decision: LoweringDecision, state: State
) -> LoweredProgram:
    """A final form of a Program as a callable, with its inputs from the state."""
    execute = lower(final, decision, state.ranks.target)
    places = [(i, role) for i, role in enumerate(final.inputs) if isinstance(role, roles.BROUGHT)]
    arguments = [None if isinstance(r, roles.BROUGHT) else state.tensors[r] for r in final.inputs]
    buffers = {r.name: state.tensors[r] for r in final.inputs if isinstance(r, roles.Buffer)}
    away = frozenset(i for i, (_, node, _) in enumerate(final.input_rows) if is_on_host(node))
    outputs = list(final.outputs)
    lowered = LoweredProgram(program, execute, arguments, places, outputs, buffers, away)
    if isinstance(execute, Graphed) and execute.advances:
        lowered.after = functools.partial(state.seed_was_advanced, program.name)
    return lowered


# -- forward and backward by themselves


@dataclass
class SplitProgram:
    """The two sides of a program ``gradients``, and where parameters and their gradients live."""

    forward: LoweredProgram
    backward: LoweredProgram
    state: State

    def __post_init__(self) -> None:
        program = self.forward.program
        values = dict(zip(program.outputs, program.output_values, strict=True))
        self.gradients = {r.name: value for r, value in values.items() if isinstance(r, roles.Grad)}
        self.learned = {r.index: v for r, v in values.items() if isinstance(r, roles.InputGrad)}
        kinds = (roles.Loss, roles.ModuleResult)
        self.results = [role for role in program.outputs if isinstance(role, kinds)]
        self.means = [self._mean(role, values[role]) for role in self.results]
        self._read_again = [*self.backward.buffers.values()]

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Runs the forward; the results carry a graph, whose backward adds to the parameters' ``.grad``.

        A gradient is that of the loss on the global batch, where results are those of the global batch;
        of results that are this rank's rows it is the mean over data-parallel ranks, as with DDP. An
        input's gradient is as DDP has it, too: that of this rank's own loss, whose mean over data-parallel
        ranks is the global one, for a module in front of this one to take the mean of.
        """
        parameters = map(self.state.parameters.__getitem__, self.gradients)
        given = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return list(_Call.apply(self, given, *(leaves[i] for i in self.learned), *parameters))

    def counts_for(self, index: int) -> int:
        """Of how many ranks' losses a leaf's gradient is the mean; a caller wants its own."""
        return self.state.ranks.shape.data_size if _is_own(self.learned[index]) else 1

    def _mean(self, role: roles.Output, result: Value) -> "Mean":
        ranks = self.state.ranks
        if _is_own(result):
            return Mean(ranks.shape.data_size)
        if not isinstance(role, roles.ModuleResult):
            return Mean(1)
        # A result that every rank has may be used in losses that differ from rank to rank.
        named = ranks.groups.items() if ranks.shape.data_size > 1 else ()
        groups = tuple(group for name, group in named if role_of(name).divides_batch)
        return Mean(ranks.shape.data_size, groups)

    def versions(self) -> list[int]:
        """How often what the backward reads was written, to find that it was in between."""
        named = map(self.state.parameters.__getitem__, self.gradients)
        return [tensor._version for tensor in (*named, *self._read_again)]


def _is_own(value: Value) -> bool:
    """Whether a data-parallel rank has rows of its own of it."""
    return any(isinstance(placement, Shard) for placement in value.placements or ())


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether a result of this type carries a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def tangent_of(result: roles.Output) -> roles.Input:
    """What the backward takes for a result."""
    is_modules = isinstance(result, roles.ModuleResult)
    return roles.ResultTangent(result.index) if is_modules else roles.Tangent()


@dataclass(frozen=True)
class Mean:
    """What a backward takes of a tangent: the mean over data-parallel ranks of their losses' gradients.

    ``ranks``: how many there are; ``groups``: over which a tangent of what all have is summed.
    """

    ranks: int
    groups: tuple[str, ...] = ()

    def of(self, tangent: torch.Tensor) -> torch.Tensor:
        """That of one rank's tangent; called by all ranks."""
        if not is_differentiable(tangent.dtype):
            return tangent
        for group in self.groups:
            tangent = torch_internals.sum_over_group(tangent.contiguous(), group)
        return tangent if self.ranks == 1 else tangent / self.ranks


CHANGED_BETWEEN = (
    "a parameter or buffer was changed between forward and backward: run the forward again, or call "
    "backward before the optimizer"
)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, split: SplitProgram, leaves: list, *learned: torch.Tensor):
        found = split.forward.run(leaves)
        saved = [value for role, value in found.items() if isinstance(role, roles.Saved)]
        ctx.save_for_backward(*saved)
        ctx.split, ctx.versions = split, split.versions()
        results = tuple(found[role].detach() for role in split.results)
        ctx.mark_non_differentiable(*(r for r in results if not is_differentiable(r.dtype)))
        return results

    @staticmethod
    def backward(ctx, *tangents: torch.Tensor):
        with torch.no_grad():
            gradients = _Call.gradients(ctx, tangents)
        if not torch.is_grad_enabled():
            return None, None, *gradients
        anchor = torch.zeros((), requires_grad=True)
        return None, None, *_Once.apply(anchor, *gradients)

    @staticmethod
    def gradients(ctx, tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the inputs that are learned, and of the parameters."""
        split: SplitProgram = ctx.split
        if split.versions() != ctx.versions:
            raise RuntimeError(CHANGED_BETWEEN)
        brought: dict[roles.Input, torch.Tensor] = {
            roles.Saved(index): value for index, value in enumerate(ctx.saved_tensors)
        }
        for role, tangent, mean in zip(split.results, tangents, split.means, strict=True):
            brought[tangent_of(role)] = mean.of(tangent)
        found = split.backward.run((), brought)
        state = split.state
        gradients = split.gradients.items()
        return [
            *(found[roles.InputGrad(i)] * split.counts_for(i) for i in split.learned),
            *(state.as_dtensor(found[roles.Grad(n)], value) for n, value in gradients),
        ]


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again: the backward is a compiled program."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, *gradients: torch.Tensor):
        return gradients

    @staticmethod
    def backward(ctx, *tangents: torch.Tensor):
        raise UsageError(
            "a gradient of a gradient (create_graph=True) goes through a compiled backward",
            why="stepgraph compiles first derivatives only, as torch.compile does",
            do="leave the module that is differentiated twice (a gradient penalty's) out of stepgraph",
        )
