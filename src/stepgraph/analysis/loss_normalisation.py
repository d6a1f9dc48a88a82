"""Reads off a joint Program how its loss is normalised over the batch.

Micro-batches are data parallelism in time, so the question is put as one of placement: shard the batch
along an imaginary mesh dimension and follow the rules. Values that come out as pending sums or means
of single numbers can be added up over micro-batches; operations that need such a number whole (the
division of a sum by a count) form the tail, which runs once, on the totals. If anything else would
have to be communicated, micro-batches cannot be exact and the mean over them is what users know.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.analysis.rows import (
    GIVEN_NUMBERS,
    MAY_COUNT_ROWS,
    NOTHING_GIVEN,
    Given,
    drawn_for_rows,
    is_batched,
    literals,
    may_count_rows,
    of_one_shape,
    takes_given,
    with_numbers,
)
from stepgraph.operators.entries import results_of
from stepgraph.operators.sharding import Rules
from stepgraph.planning.decisions import Normalisation
from stepgraph.program import roles
from stepgraph.program.layout import Apart, Spread
from stepgraph.program.metadata import meta
from stepgraph.program.program import BACKWARD, FORWARD, Program, tensor_arguments
from stepgraph.program.randomness import RANDOM

aten = torch.ops.aten
_LOSS, _TANGENT = roles.Loss(), roles.Tangent()
TAIL = "tail"  # a single number that is known only once all micro-batches are


def find_normalisation(
    program: Program,
    loss: roles.Output = _LOSS,
    tangent: roles.Input = _TANGENT,
    rows: int | None = None,
    spread: Mapping[roles.Input, Spread] | None = None,
) -> Normalisation:
    """How the loss of a joint Program adds up over slices of its batch.

    Args:
        loss, tangent: the roles of the loss and of its gradient.
        rows: only inputs whose first dimension is a multiple of it are sharded, and may be activations that
            depend on parameters; None: all of the user's are sharded.
        spread: inputs of which it is known how slices have them, whatever their shapes.
    """
    return _Walk(program, tangent, rows, spread or {}).run(program.result(loss))


def inexact(loss: fx.Node, reason: str) -> Normalisation:
    """The mean over micro-batches, because of a reason."""
    return Normalisation({meta(loss)["name"]: "avg"}, set(), None, "avg", False, reason)


@dataclass
class Totals:
    """How slices have results, and what to add up over them for those that no gradient comes to.

    Attributes:
        kinds: names of values and how (``sum``, ``avg``, ``max``, ``min``), in graph order: every rank must
            count in the same order.
        tail: names of the operations that read them added up.
        results: by index, how slices have them once that is added up.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    tail: set[str] = field(default_factory=set)
    results: dict[int, Spread] = field(default_factory=dict)


def find_totals(
    program: Program,
    rows: int,
    spread: Mapping[roles.Input, Spread],
    adds: bool,
    given: Given = NOTHING_GIVEN,
    waits: bool = True,
) -> Totals:
    """How slices have the results of a graph.

    Args:
        rows, spread: as for :func:`find_normalisation`.
        adds: whether what results need whole is added up; otherwise those are each slice's own.
        given: numbers that code between graphs handed over: they may be each slice's own.
        waits: results that are sums themselves stay pending.
    """
    return _Walk(program, None, rows, spread).totals(adds, given, waits)


class _Inexact(Exception):
    pass


class _Walk:
    def __init__(
        self,
        program: Program,
        tangent: roles.Input | None,
        rows: int | None,
        spread: Mapping[roles.Input, Spread],
    ) -> None:
        self.program, self.rows, self.tangent, self.spread = program, rows, tangent, spread
        # On a dimension of one rank every size divides; the rules answer as on any other.
        self.rules = Rules(1)
        self.state: dict[fx.Node, tuple[Placement | str | Apart | None, ...]] = {}
        # Computed with plain numbers, on the way from sums to the loss.
        self.scaled: set[fx.Node] = set()
        self.varies: set[fx.Node] = set()  # depends on the batch
        self.learns: set[fx.Node] = set()  # depends on a parameter
        # How a value was last read, and random numbers that are rows'.
        self.read_as: dict[fx.Node, Placement] = {}
        self.drawn: dict[fx.Node, Shard] = {}

    def run(self, loss: fx.Node) -> Normalisation:
        self._forward()
        try:
            return self._read_off(loss)
        except _Inexact as error:
            return inexact(loss, str(error))

    def totals(self, adds: bool, given: Given, waits: bool) -> Totals:
        self._forward()
        tail = {node for node, states in self.state.items() if states == (TAIL,)}
        made, found = Totals(), set()
        for role, result, _ in self.program.output_rows:
            if not isinstance(role, roles.ModuleResult):
                continue
            (state,) = self.state[result]
            if isinstance(state, (Apart, Shard)) or result not in self.varies:
                made.results[role.index] = state
                continue
            behind = self._behind(result, tail)
            pending = state if isinstance(state, Partial) and (waits or not adds) else None
            if reason := self._why_apart(result, behind, given):
                made.results[role.index] = Apart(reason)
            elif pending or not adds:
                name = meta(result)["name"]
                made.results[role.index] = pending or Apart(f"{name} needs the whole batch at once")
            else:
                made.results[role.index] = Replicate()
                made.tail |= {meta(node)["name"] for node in behind}
                found |= self._totals(result, behind)
        made.kinds = self._kinds(found)
        for role, result, _ in self.program.output_rows:
            handed_out = isinstance(role, roles.ModuleResult) and result.op != "placeholder"
            if handed_out and result in found:  # added up; an input is the caller's own
                made.results[role.index] = Replicate()
        return made

    def _behind(self, result: fx.Node, tail: set[fx.Node]) -> set[fx.Node]:
        """What of the tail leads to a result."""
        found = [result] if result in tail else []
        for node in found:  # grows
            found += [n for n in node.all_input_nodes if n in tail and n not in found]
        return set(found)

    def _why_apart(self, result: fx.Node, behind: set[fx.Node], given: Given) -> str | None:
        """Why a result that depends on the batch, and is no rows of it, is not to be added up."""
        readers = {user for node in behind for user in node.users if user in self.state}
        if any(isinstance(self.state[user][0], Apart) for user in readers):
            return f"{meta(result)['name']} is computed with rows"
        if takes_given(self.program, result, given):
            return GIVEN_NUMBERS
        return MAY_COUNT_ROWS if may_count_rows(self.program, result, self.rows or 1) else None

    def _forward(self) -> None:
        for role, node, value in self.program.input_rows:
            batched = is_batched(role, value, self.rows)
            state = self.spread.get(role) or (Shard(0) if batched else Replicate())
            self.state[node] = (state,)
            if not isinstance(state, Replicate):
                self.varies.add(node)
            activation = self.rows is not None and value.dtype.is_floating_point
            if isinstance(role, roles.Param) or activation:
                self.learns.add(node)
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.state[node] = (Replicate(),)
            elif node.op == "call_function" and meta(node)["phase"] == FORWARD:
                self._visit(node)
        drawn = {n: self._drawn_as(n) for n in self.state if n.target is RANDOM}
        self.drawn = {node: shard for node, shard in drawn.items() if shard} | self.drawn
        if not self.drawn.keys() <= self.varies:
            self._forward()

    def _drawn_as(self, drawn: fx.Node) -> Shard | None:
        """How slices have random numbers of rows that are read alone too: a mask that is also counted.

        As what of their shape is made of them is read beside rows, or by how many there are.
        """
        masks = dict.fromkeys(of_one_shape(drawn, before=self.varies))
        readers = {user for mask in masks for user in mask.users if user not in masks}
        if not any(user in self.state or user.op == "output" for user in readers - self.varies):
            return None
        shards = (shard for mask in masks if isinstance(shard := self.read_as.get(mask), Shard))
        return next(shards, None) or drawn_for_rows(self.program, drawn, self.rows)

    def _visit(self, node: fx.Node) -> None:
        if shard := self.drawn.get(node):
            self.varies.add(node)
            self.state[node] = (shard,)
            return
        arguments = tensor_arguments(node)
        if any(argument in self.varies for argument in arguments):
            self.varies.add(node)
        value = meta(node)["val"]
        whole_numbers = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
        if not whole_numbers and any(argument in self.learns for argument in arguments):
            self.learns.add(node)
        if node.target.__name__ == "getitem":  # type: ignore[union-attr]
            self.state[node] = (self.state[arguments[0]][node.args[1]],)  # type: ignore[index]
            return
        if node not in self.varies:
            self.state[node] = (Replicate(),) * len(results_of(node))
            return
        states = [self.state[argument][0] for argument in arguments]
        if apart := next((state for state in states if isinstance(state, Apart)), None):
            self.state[node] = (apart,) * len(results_of(node))
            return
        if TAIL not in states:
            placements = tuple(s if isinstance(s, Placement) else Replicate() for s in states)
            free = [
                strategy
                for strategy in self.rules.strategies(node, placements)
                if all(
                    have == want or (isinstance(have, Replicate) and isinstance(want, Shard))
                    for have, want in zip(placements, strategy.inputs, strict=True)
                )
            ]
            if free:  # the one that shards the fewest constants
                chosen = max(free, key=lambda s: sum(map(operator.eq, placements, s.inputs)))
                self.state[node] = chosen.outputs
                self.read_as |= dict(zip(arguments, chosen.inputs, strict=True))
                if isinstance(self.state[node][0], Partial):
                    self.scaled |= with_numbers(self.program, node)
                return
        single = all(
            meta(argument)["val"].dim() == 0 and (s == TAIL or isinstance(s, Partial))
            for argument, s in zip(arguments, states, strict=True)
            if argument in self.varies
        )
        if not single or meta(node)["val"].dim():
            apart = Apart(f"{meta(node)['name']} needs the whole batch at once")
            self.state[node] = (apart,) * len(results_of(node))
            return
        self.state[node] = (TAIL,)
        self.scaled |= with_numbers(self.program, node)

    def _read_off(self, loss: fx.Node) -> Normalisation:
        (state,) = self.state[loss]
        tail = {node for node, states in self.state.items() if states == (TAIL,)}
        if isinstance(state, Apart):
            raise _Inexact(state.reason)
        if state != TAIL and not isinstance(state, Partial):
            raise _Inexact("the loss is not a sum or mean over the batch")
        totals = self._totals(loss, tail)
        tail |= self._constants_behind(tail)
        apart = self._learns_apart(tail)
        boundary = self._backward_tail(tail, totals) if state == TAIL else None
        kinds = self._kinds(totals)
        if not set(kinds.values()) <= {"sum", "avg"}:
            raise _Inexact("the loss is a maximum or minimum over the batch")
        names = {meta(node)["name"] for node in tail if node.op == "call_function"}
        learned = {kinds[meta(node)["name"]] for node in totals if node in self.learns}
        if len(learned) != 1:
            raise _Inexact("parts of the loss are normalised in different ways")
        kind = learned.pop()
        if kind == "sum" and apart:
            raise _Inexact("a term of the loss is no sum over the batch")
        numbers = self._numbers(loss)
        return Normalisation(kinds, names, boundary, kind, True, numbers=numbers)

    def _totals(self, loss: fx.Node, tail: set[fx.Node]) -> set[fx.Node]:
        """What is added up: the loss, or what its tail reads."""
        if loss not in tail:
            return {loss}
        return {
            argument
            for node in tail
            for argument in node.all_input_nodes
            if argument in self.varies and argument not in tail
        }

    def _kinds(self, totals: set[fx.Node]) -> dict[str, str]:
        return {
            meta(node)["name"]: self.state[node][0].reduce_op  # type: ignore[union-attr]
            for node in [*self.program.placeholders, *self.program.operations()]
            if node in totals
        }

    def _numbers(self, loss: fx.Node) -> dict[str, tuple]:
        """Plain numbers between the totals that learn and the loss: one may be the number of rows."""
        found, stack = {}, [loss]
        while stack:
            node = stack.pop()
            if node in self.scaled and node in self.learns:
                found[meta(node)["name"]] = literals(self.program, node)
            stack += [n for n in node.all_input_nodes if n in self.scaled or self._is_number(n)]
        return found

    def _is_number(self, node: fx.Node) -> bool:
        value = meta(node)["val"]
        return isinstance(value, torch.Tensor) and value.dim() == 0 and node in self.varies

    def _constants_behind(self, tail: set[fx.Node]) -> set[fx.Node]:
        """Constants that only the tail reads belong to it."""
        return {
            argument
            for node in tail
            for argument in node.all_input_nodes
            if argument.op == "call_function"
            and argument not in self.varies
            and all(user in tail for user in argument.users)
        }

    def _learns_apart(self, tail: set[fx.Node]) -> bool:
        """Whether a loss that is a sum has a term that every slice would add again: of weights alone."""
        read = {argument for node in tail for argument in node.all_input_nodes}
        return any(node in self.learns and node not in self.varies for node in read)

    def _backward_tail(self, tail: set[fx.Node], totals: set[fx.Node]) -> str | None:
        """Extends the tail by the backward's part on single numbers; returns its boundary's name."""
        if self.tangent not in self.program.inputs:
            return None
        tangent = self.program.input_node(self.tangent)
        inside = {tangent}
        for node in self.program.operations(BACKWARD):
            value = meta(node)["val"]
            sources = node.all_input_nodes
            if (
                isinstance(value, torch.Tensor)
                and value.dim() == 0
                and any(source in inside for source in sources)
                and all(
                    s in inside or s in tail or s in totals or not self._varies(s) for s in sources
                )
            ):
                inside.add(node)
        outputs = set(self.program.results)
        boundary = [
            node
            for node in inside
            if any(user not in inside and user.op == "call_function" for user in node.users)
            or (node in outputs and node is not tangent)
        ]
        for node in self.program.operations(BACKWARD):
            if node not in inside and any(
                source in tail and source in self.varies or source in totals - inside
                for source in node.all_input_nodes
            ):
                raise _Inexact(f"{meta(node)['name']} reads a sum over the whole batch")
        if boundary == [tangent]:
            return None
        if len(boundary) != 1:
            raise _Inexact("parts of the loss are normalised in different ways")
        tail |= inside - {tangent}
        return meta(boundary[0])["name"]

    def _varies(self, node: fx.Node) -> bool:
        backward = node.op == "call_function" and meta(node)["phase"] == BACKWARD
        return node in self.varies or (backward and any(map(self._varies, node.all_input_nodes)))


def by_rows(found: Normalisation, twice: Normalisation, loss: fx.Node) -> Normalisation:
    """What a normalisation is, seen beside that of the same loss on twice as many rows.

    ``(y - x).square().sum() / len(x)`` is captured with a plain number for ``len(x)``. A number that does
    not change is none of that kind; one that doubles makes a mean of a sum.
    """
    changed = [name for name, has in found.numbers.items() if twice.numbers.get(name) != has]
    if not changed:
        return found
    ratio = None
    alone = len(changed) == 1 and list(found.totals) == [meta(loss)["name"]]
    if found.gradient_kind == "sum" and alone:
        (name,) = changed
        pairs = zip(found.numbers[name], twice.numbers.get(name, ()), strict=False)
        ratio = [after / before for before, after in pairs if before]
    if ratio in ([2.0], [0.5]):
        return replace(found, totals={meta(loss)["name"]: "avg"}, gradient_kind="avg", numbers={})
    return inexact(loss, "it is computed with numbers that depend on the rows of a batch")
