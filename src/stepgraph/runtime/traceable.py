"""A placed module as torch.compile may trace it: the operations of its programs, forward and backward.

Compiled once more, a module's graph gets the forward and the backward that were decided for it, collectives
included, and nothing is decided again. What has to happen at every call and in no graph (seeds move on,
what code read from Python is compared) is one operation in front of it.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.lowering.partition import forward_and_backward
from stepgraph.operators.views import viewed
from stepgraph.pipeline import GRAPH_LOWERED
from stepgraph.program import roles
from stepgraph.program.copies import is_on_host
from stepgraph.program.driver import PassDriver
from stepgraph.program.program import Program
from stepgraph.runtime.executor import (
    CHANGED_BETWEEN,
    SplitProgram,
    is_differentiable,
    tangent_of,
)
from stepgraph.torch_internals import dtensors, host_device
from stepgraph.torch_internals.code import generate_code
from stepgraph.torch_internals.kept import keep_in_backward, keep_what_is_marked, mark

aten = torch.ops.aten
_NUMBERS = itertools.count(1)
_MADE: weakref.WeakValueDictionary[int, Traceable] = weakref.WeakValueDictionary()
_MOVED = (*roles.SEEDS, roles.Outside)  # inputs that are written before a call


@torch.library.custom_op("stepgraph::begin_call", mutates_args=("written",))
def begin_call(written: Sequence[torch.Tensor], number: int) -> None:
    """What a call of a module does outside of its graph.

    Args:
        written: what random operations draw from, what comes from outside; last how often what the
            backward reads was written so far.
        number: of a :class:`Traceable`.
    """
    _MADE[number].begin_call(written)


@begin_call.register_fake
def _(written: Sequence[torch.Tensor], number: int) -> None:
    return None


@torch.library.custom_op("stepgraph::unchanged", mutates_args=())
def unchanged(tangent: torch.Tensor, writes: torch.Tensor, number: int) -> torch.Tensor:
    """A copy of a tangent, where what the backward reads was not written since the forward.

    Raises:
        RuntimeError: it was.
    """
    if int(writes) != _MADE[number].writes():
        raise RuntimeError(CHANGED_BETWEEN)
    return tangent.clone(memory_format=torch.contiguous_format)


@unchanged.register_fake
def _(tangent: torch.Tensor, writes: torch.Tensor, number: int) -> torch.Tensor:
    return tangent.new_empty(tangent.shape)


@torch.library.custom_op("stepgraph::holds", mutates_args=("written",))
def holds(written: torch.Tensor, held: Sequence[torch.Tensor]) -> None:
    """Nothing; to a compiler, that a forward cannot do without what its backward alone reads of the host.

    Args:
        written: any of what a call writes.
        held: copies on the host, which cannot be made in the backward: then nothing would be saved by them.
    """


@holds.register_fake
def _(written: torch.Tensor, held: Sequence[torch.Tensor]) -> None:
    return None


class Traceable:
    """A training call of a module for one kind of batch.

    Args:
        split: its programs.
        begin: called before each call.
    """

    def __init__(self, split: SplitProgram, begin: Callable[[], None]) -> None:
        self.number, self._begin = next(_NUMBERS), begin
        _MADE[self.number] = self
        state = split.state
        program = split.forward.program.copy()
        program = PassDriver().through(GRAPH_LOWERED, program, groups=state.ranks.groups)
        sides = forward_and_backward(program)
        new = [role for role in sides[0].outputs if isinstance(role, roles.NewBuffer)]
        read = (role for side in sides for role in side.inputs)
        inputs = list(dict.fromkeys([*read, *(roles.Buffer(role.name) for role in new)]))
        batch = [role for role in inputs if isinstance(role, roles.UserInput)]
        parameters = [role for role in inputs if isinstance(role, roles.Param)]
        fixed = [r for r in inputs if not isinstance(r, (roles.Param, *roles.BROUGHT))]
        self.leaves = [role.index for role in batch]
        self.parameters = [state.parameters[role.name] for role in parameters]
        self.fixed = [state.tensors[role] for role in fixed]
        moved = [state.tensors[role] for role in fixed if isinstance(role, _MOVED)]
        self.moved = [*moved, torch.zeros((), dtype=torch.int64, device=host_device())]
        self.results = len(split.results)
        self.buffers = [fixed.index(roles.Buffer(role.name)) for role in new]
        given = [*batch, *fixed, *parameters]
        self._split = split
        self.function = _function(split, *sides, given, new, self.number)

    def begin_call(self, written: Sequence[torch.Tensor]) -> None:
        """What is written before a call; torch may want that in copies of its own."""
        self._begin()
        self.moved[-1].fill_(self.writes())
        for tensor, own in zip(written, self.moved, strict=True):
            if tensor.data_ptr() != own.data_ptr():
                tensor.copy_(own)

    def writes(self) -> int:
        """How often what the backward reads was written so far."""
        return sum(self._split.versions())

    def __call__(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The results on this rank's rows, by the flattened batch; for dynamo to trace."""
        begin_call(self.moved, self.number)
        parts = [parameter.to_local() for parameter in self.parameters]
        # One tensor may be given twice (ids that are labels, too), of which dynamo wants two here.
        batch = [leaves[i].contiguous().view(leaves[i].shape) for i in self.leaves]
        found = self.function.apply(self.moved[-1], *batch, *self.fixed, *parts)
        behind = self.results + len(self.buffers)
        with torch.no_grad():
            written = found[self.results : behind]
            for place, value in zip(self.buffers, written, strict=True):
                self.fixed[place].copy_(value)
            if held := list(found[behind:]):
                holds(self.moved[-1], held)
        return list(found[: self.results])


def _function(
    split: SplitProgram,
    first: Program,
    second: Program,
    given: Sequence[roles.Input],
    new: Sequence[roles.NewBuffer],
    number: int,
) -> type[torch.autograd.Function]:
    """Both sides as one function that autograd knows.

    Args:
        first, second: forward and backward.
        given: what the function takes.
        new: what the forward makes besides results.
        number: of its :class:`Traceable`.
    """
    run_first, run_second = first.module, second.module
    sent = [at for at, (_, node, _) in enumerate(first.output_rows) if is_on_host(node)]
    mark(first.graph, _makers_of_saved(first))
    for side in (run_first, run_second):
        for node in side.graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default  # another compiler may lay values out otherwise
        generate_code(side)  # it is what dynamo reads
    place = {role: i for i, role in enumerate(given)}
    returned = [first.outputs.index(role) for role in (*split.results, *new)]
    dtypes = [first.output_values[at].dtype for at in returned]
    constant = [i for i, dtype in enumerate(dtypes) if not is_differentiable(dtype)]
    constant += range(len(returned), len(returned) + len(sent))
    returned += sent
    saved = [i for i, role in enumerate(first.outputs) if isinstance(role, roles.Saved)]
    again = [place[role] for role in second.inputs if role in place]
    overwritten = {place.get(roles.Buffer(role.name)) for role in new}
    taken = [place[role] for role in first.inputs]
    brought: list[Any] = [*(first.outputs[i] for i in saved), *(given[i] for i in again)]
    brought += map(tangent_of, split.results)
    order = [brought.index(role) for role in second.inputs]
    sizes = [_sizes(split, role) for role in given]
    gradients = [_gradient_of(split, second, role) for role in given]
    means = split.means
    tangents_of = [i for i, r in enumerate(map(tangent_of, split.results)) if r in second.inputs]
    checked = tangents_of[
        :1
    ]  # of what the backward does read; of a constant result it reads nothing

    class Placed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, writes, *tensors):
            whole = [
                x.clone() if i in overwritten else _padded(x, *sizes[i])
                for i, x in enumerate(tensors)
            ]
            found = keep_what_is_marked(run_first, *[whole[i] for i in taken])
            kept = [*(found[i] for i in saved), *(whole[i] for i in again)]
            ctx.save_for_backward(writes.clone(), *kept)
            results = tuple(found[i] for i in returned)
            ctx.mark_non_differentiable(*[results[i] for i in constant])
            return results

        @staticmethod
        def backward(ctx, *tangents):
            writes, *saved = ctx.saved_tensors
            own = [tangents[i].contiguous() for i in range(len(means))]
            for i in checked:
                own[i] = unchanged(own[i], writes, number)
            values = [*saved, *(mean.of(own[i]) for i, mean in enumerate(means))]
            found = keep_in_backward(run_second, *[values[i] for i in order])
            return None, *(
                None if at is None else _narrowed(found[at] * counts, sizes[i][0])
                for i, (at, counts) in enumerate(gradients)
            )

    return Placed


def _makers_of_saved(forward: Program) -> list[fx.Node]:
    """The operations that make what the backward reads of a forward; of a view, all that lead to it."""
    makers: dict[fx.Node, None] = {}
    for role, node, _ in forward.output_rows:
        of_saved: fx.Node | None = node if isinstance(role, roles.Saved) else None
        while of_saved is not None and of_saved.op == "call_function":
            if of_saved.target is not operator.getitem:
                makers[of_saved] = None
            of_saved = viewed(of_saved)
    return [*makers]


_Sizes = tuple[tuple[int, ...], tuple[int, ...]]


def _sizes(split: SplitProgram, role: roles.Input) -> _Sizes:
    """Of a parameter: of this rank's part, and of that with its padding; of anything else, nothing."""
    if not isinstance(role, roles.Param):
        return (), ()
    part = dtensors.own_part(split.state.parameters[role.name])  # type: ignore[arg-type]
    return tuple(part.shape), tuple(split.state.tensors[role].shape)


def _gradient_of(
    split: SplitProgram, backward: Program, role: roles.Input
) -> tuple[int | None, int]:
    """Which of the backward's results is the gradient of an input, and what that is multiplied by."""
    match role:
        case roles.Param(name) if roles.Grad(name) in backward.outputs:
            return backward.outputs.index(roles.Grad(name)), 1
        case roles.UserInput(index=index) if index in split.learned:
            return backward.outputs.index(roles.InputGrad(index)), split.counts_for(index)
    return None, 1


def _padded(tensor: torch.Tensor, own: tuple[int, ...], whole: tuple[int, ...]) -> torch.Tensor:
    """A part of a parameter, as large as every rank's."""
    if own == whole:
        return tensor
    missing = [size - there for size, there in zip(whole, own, strict=True)]
    return torch.nn.functional.pad(tensor, [n for more in reversed(missing) for n in (0, more)])


def _narrowed(gradient: torch.Tensor, own: tuple[int, ...]) -> torch.Tensor:
    """A gradient, as large as this rank's part."""
    for dim, size in enumerate(own):
        if gradient.shape[dim] != size:
            gradient = gradient.narrow(dim, 0, size)
    return gradient
