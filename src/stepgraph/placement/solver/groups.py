"""Operations that are decided together, and groups of them that are decided alike.

What a fusing compiler runs as one kernel is placed as one: its costs are counted so, and moving a value in
the middle would end it (sums that it begins may be added up over ranks inside). A view joins its only
reader, or else its only source: moving a value before or after it costs the same, so nothing is lost by
deciding both at once. Groups that do the same in repeated layers (the same operations on the same shapes,
in modules whose paths differ in numbers alone) share one decision: what is solved does not grow with the
number of layers.
"""

import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.operators.entries import Strategy
from stepgraph.operators.views import REARRANGES
from stepgraph.program.build import freeze
from stepgraph.program.metadata import meta
from stepgraph.program.program import Program, tensor_arguments


@dataclass(eq=False)
class Group:
    """Operations decided together, in graph order.

    ``ports`` are the values read from other groups: (operation, position among its tensor arguments).
    ``options`` are the ways to place all of them along one mesh dimension.
    """

    nodes: list[fx.Node]
    ports: list[tuple[fx.Node, int]] = field(default_factory=list)
    options: list[dict[fx.Node, Strategy]] = field(default_factory=list)

    def edges(self) -> list[tuple[fx.Node, fx.Node, int]]:
        """What its operations read of one another: (value, reader, position among its arguments)."""
        inside = set(self.nodes)
        return [
            (argument, node, position)
            for node in self.nodes
            for position, argument in enumerate(tensor_arguments(node))
            if argument in inside
        ]


# A kernel may do several things that have little to do with each other (the sums of a batch norm's
# backward): how each could be done multiplies. Beyond this it is decided part by part.
_MOST_OPTIONS, _MOST_WAYS = 32, 20_000


def find_groups(program: Program, strategies: dict[fx.Node, list[Strategy]]) -> list[Group]:
    """Groups in graph order, with their options."""
    group_of: dict[fx.Node, Group] = {}
    results = set(program.results)
    kernels: dict[Any, Group] = {}
    spans = _spans(strategies)
    for node in strategies:
        kernel = meta(node).get("kernel")
        # Reading the same mask is no reason to place all layers at once.
        if spans.get(kernel, 0) > 2:
            kernel = (kernel, _numbers(node))
        own = Group([])
        group_of[node] = own if kernel is None else kernels.setdefault(kernel, own)
        group_of[node].nodes.append(node)
    joined: set[fx.Node] = set()
    for node in reversed(list(strategies)):
        readers = [user for user in node.users if user.op != "output"]
        if node.target in REARRANGES and len(readers) == 1 and node not in results:
            (reader,) = readers
            if reader in group_of and _joins(strategies, node, reader):
                _merge(group_of, group_of[reader], group_of[node])
                joined.add(node)
    for node in strategies:
        source = tensor_arguments(node)[0] if tensor_arguments(node) else None
        if source is None or group_of.get(source) in (None, group_of[node]) or node in joined:
            continue
        alone = len(source.users) == 1 and source not in results
        if node.target is operator.getitem or (
            node.target in REARRANGES and alone and _follows(strategies, source, node)
        ):
            _merge(group_of, group_of[source], group_of[node])
    order = {node: i for i, node in enumerate(strategies)}
    for group in set(group_of.values()):
        group.nodes.sort(key=order.__getitem__)
    known: dict[Any, list[list[Strategy]] | None] = {}
    return [
        settled
        for group in dict.fromkeys(group_of[node] for node in strategies)
        for settled in _settled(group, strategies, results, known)
    ]


def _settled(
    group: Group, strategies: dict[fx.Node, list[Strategy]], results: set[fx.Node], known: dict
) -> list[Group]:
    """A group with its ports and options; the parts of one that has too many of them."""
    inside = set(group.nodes)
    visible = [n for n in group.nodes if n in results or not inside.issuperset(n.users)]
    group.ports = [
        (node, position)
        for node in group.nodes
        for position, argument in enumerate(tensor_arguments(node))
        if argument not in inside
    ]
    parts = next((found for keep in _BONDS if len(found := _parts(group, keep)) > 1), None)
    key = (_signature(group), tuple(group.nodes.index(n) for n in visible))
    if key not in known:
        ways = _options(group, strategies)
        some = list(ways if parts is None else itertools.islice(ways, _MOST_WAYS + 1))
        best = _best_of(group, visible, some)
        many = parts is not None and (len(some) > _MOST_WAYS or len(best) > _MOST_OPTIONS)
        known[key] = None if many else best
    options = known[key]
    if options is None:
        assert parts is not None
        return [one for part in parts for one in _settled(part, strategies, results, known)]
    group.options = [dict(zip(group.nodes, option, strict=True)) for option in options]
    return [group]


# What still holds a group together when it is taken apart, more and more.
_BONDS: tuple[Callable[[fx.Node], bool], ...] = (
    lambda reader: True,
    lambda reader: reader.target is operator.getitem or reader.target in REARRANGES,
    lambda reader: reader.target is operator.getitem,
)


def _parts(group: Group, keep: Callable[[fx.Node], bool]) -> list[Group]:
    """A group's operations, together where one reads another and ``keep`` says so; in graph order."""
    part_of: dict[fx.Node, Group] = {}
    for node in group.nodes:
        part_of[node] = Group([node])
        for argument in node.all_input_nodes:
            if argument in part_of and keep(node) and part_of[argument] is not part_of[node]:
                _merge(part_of, part_of[argument], part_of[node])
    parts = list(dict.fromkeys(part_of.values()))
    order = {node: i for i, node in enumerate(group.nodes)}
    for part in parts:
        part.nodes.sort(key=order.__getitem__)
    return parts


def _spans(nodes: Iterable[fx.Node]) -> dict[Any, int]:
    """How many layers each kernel has operations of."""
    layers: dict[Any, set] = {}
    for node in nodes:
        if meta(node).get("kernel") is not None and _numbers(node):
            layers.setdefault(meta(node)["kernel"], set()).add(_numbers(node))
    return {kernel: len(numbers) for kernel, numbers in layers.items()}


def _numbers(node: fx.Node) -> tuple[str, ...]:
    return tuple(part for part in meta(node).get("module", "").split(".") if part.isdigit())


def _best_of(
    group: Group, visible: list[fx.Node], options: Iterable[list[Strategy]]
) -> list[list[Strategy]]:
    """Of options that look alike from outside the one that divides most of the work."""
    index = {node: i for i, node in enumerate(group.nodes)}
    readers = [(node, i) for value, node, i in group.edges() if value in visible]
    best: dict[Any, tuple[int, list[Strategy]]] = {}
    for option in options:
        ports = tuple(option[index[node]].inputs[i] for node, i in group.ports)
        seen = tuple(option[index[node]].outputs for node in visible)
        key = (ports, seen, tuple(option[index[node]].inputs[i] for node, i in readers))
        divided = sum(isinstance(p, Shard) for s in option for p in s.outputs)
        if key not in best or divided > best[key][0]:
            best[key] = (divided, option)
    return [option for _, option in best.values()]


def _merge(group_of: dict[fx.Node, Group], into: Group, other: Group) -> None:
    into.nodes += other.nodes
    for node in other.nodes:
        group_of[node] = into


def _joins(strategies: dict[fx.Node, list[Strategy]], view: fx.Node, reader: fx.Node) -> bool:
    """Whether a view can give its reader everything that the reader could want."""
    if reader.target is operator.getitem:
        return False
    made = {s.outputs[0] for s in strategies[view]}
    positions = [i for i, a in enumerate(tensor_arguments(reader)) if a is view]
    return all(s.inputs[i] in made for s in strategies[reader] for i in positions)


def _follows(strategies: dict[fx.Node, list[Strategy]], source: fx.Node, view: fx.Node) -> bool:
    """Whether a view can take its source however that is made."""
    taken = {s.inputs[0] for s in strategies[view]}
    return all(s.outputs[0] in taken for s in strategies[source])


def _options(group: Group, strategies: dict[fx.Node, list[Strategy]]) -> Iterable[list[Strategy]]:
    """All choices of one strategy per operation that agree inside the group.

    Sums may be added up over ranks inside it: a norm, or a loss, whose rows are sharded; or several of them
    together. Not before its last view: behind it they are added up as cheaply, and a gradient's with no one
    waiting.
    """
    inside = {node: i for i, node in enumerate(group.nodes)}

    def extend(chosen: list[Strategy]) -> Iterable[list[Strategy]]:
        if len(chosen) == len(group.nodes):
            yield chosen
            return
        node = group.nodes[len(chosen)]
        arguments = tensor_arguments(node)
        leaves = node.target in REARRANGES and inside.keys().isdisjoint(node.users)
        for strategy in strategies[node]:
            agrees = True
            for argument, placement in zip(arguments, strategy.inputs, strict=True):
                if argument in inside:
                    outputs = chosen[inside[argument]].outputs
                    index = node.args[1] if node.target is operator.getitem else 0
                    agrees = agrees and (
                        outputs[index] == placement  # type: ignore[index]
                        or (not leaves and _added_up(chosen[inside[argument]], placement))
                        or _collected(chosen[inside[argument]], placement)
                    )
            if agrees:
                yield from extend([*chosen, strategy])

    return extend([])


def _added_up(strategy: Strategy, wanted: Placement) -> bool:
    """Whether what an operation begins to sum over ranks is wanted summed."""
    begins = not any(isinstance(p, Partial) for p in strategy.inputs)
    return begins and isinstance(strategy.outputs[0], Partial) and not isinstance(wanted, Partial)


def _collected(strategy: Strategy, wanted: Placement) -> bool:
    """Whether several sums over ranks, added up first, are wanted summed."""
    pending = [isinstance(p, Partial) for p in (*strategy.inputs, strategy.outputs[0])]
    return len(pending) > 2 and all(pending) and not isinstance(wanted, Partial)


def _signature(group: Group) -> tuple:
    """What a group does: equal for groups of repeated layers."""
    inside = {node: i for i, node in enumerate(group.nodes)}
    parts = []
    for node in group.nodes:
        sources = tuple(inside.get(argument, -1) for argument in tensor_arguments(node))
        parts.append((node.target, freeze(node.args), freeze(node.kwargs), sources))
    return tuple(parts)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def folded(path: str) -> str:
    """A module path without the numbers of repeated layers: ``layers.3.mlp`` is ``layers.*.mlp``."""
    return _NUMBER.sub("*", path)


def share(
    groups: list[Group], apart: Callable[[Group], Hashable] = lambda group: None
) -> list[list[Group]]:
    """Groups that are decided alike, in order of their first one; not those for which ``apart`` differs."""
    classes: dict[Any, list[Group]] = {}
    for group in groups:
        modules = tuple(
            (folded(str(meta(node).get("module", ""))), meta(node)["phase"]) for node in group.nodes
        )
        traffic = tuple((meta(n).get("traffic"), meta(n).get("starts", True)) for n in group.nodes)
        classes.setdefault((_signature(group), modules, traffic, apart(group)), []).append(group)
    return list(classes.values())
