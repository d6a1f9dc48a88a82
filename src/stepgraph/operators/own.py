"""Operators that are not torch's: what their authors say of them (:func:`stepgraph.register_operator`)."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph.errors import UsageError
from stepgraph.program.metadata import meta

Dims = tuple[str, ...]  # the names of one tensor's dimensions
Way = tuple[tuple[Placement, ...], tuple[Placement | None, ...]]

_OF_TORCH = ("aten", "prim", "prims", "stepgraph")
_NAMESPACE = re.compile(r"([^\W\d_]\w*)(?:\.|::)\w")
_DIM = re.compile(r"_|\((?P<whole>\w+)\)|(?P<name>[^\W\d_]\w*)(?P<sums>\+?)")


@dataclass(frozen=True)
class Sharding:
    """How dimensions of an operator's tensors may be sharded together, by name.

    ``ways``: the names; ``sums``: those of which a result is a sum that lacks them.
    """

    text: str
    arguments: tuple[Dims, ...]
    results: tuple[Dims, ...]
    ways: tuple[str, ...]
    sums: frozenset[str]

    def misfit(self, arguments: Sequence[Any], results: Sequence[Any]) -> str:
        """What of a call's tensors does not fit, None where one was not given; empty if all fit."""
        sizes: dict[str, int] = {}
        rows = (("argument", self.arguments, arguments), ("result", self.results, results))
        for kind, named, tensors in rows:
            if len(named) > len(tensors) or (kind == "result" and len(named) < len(tensors)):
                return f"the call has {len(tensors)} {kind}s"
            for position, (dims, tensor) in enumerate(zip_longest(named, tensors, fillvalue=())):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.dim() != len(dims):
                    return f"{kind} {position} has shape {list(tensor.shape)}"
                for name, size in zip(dims, tensor.shape, strict=True):
                    if name != "_" and sizes.setdefault(name, size) != size:
                        return f"{name} is {sizes[name]} and {size}"
        return ""

    def way(self, name: str, arguments: Sequence[Any], results: Sequence[Any]) -> Way:
        """Placements of the tensors of a call that fits, sharded along one of ``ways``."""

        def place(dims: Dims, otherwise: Placement) -> Placement:
            return Shard(dims.index(name)) if name in dims else otherwise

        given = zip_longest(self.arguments, arguments, fillvalue=())
        made = zip(self.results, results, strict=True)
        return (
            tuple(place(dims, Replicate()) for dims, value in given if value is not None),
            tuple(None if v is None else place(dims, Partial("sum")) for dims, v in made),
        )


@dataclass(frozen=True)
class OwnOperator:
    """What is known of one; ``saves``: positions of the arguments that its backward reads."""

    target: Any
    sharding: tuple[Sharding, ...] = ()
    cost: Callable[..., tuple[float, float]] | None = None
    saves: tuple[int, ...] = ()


REGISTERED: dict[Any, OwnOperator] = {}


def is_own(operator: object) -> bool:
    """Whether an operator, or its name, is neither torch's nor of this package."""
    match = _NAMESPACE.match(str(operator))
    return match is not None and match[1] not in _OF_TORCH


def parse_sharding(text: str) -> Sharding:
    """Reads a text such as ``"rows _, _ -> rows _"``.

    Raises:
        ValueError: it is malformed; the message says where.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError("it needs one '->' between arguments and results")
    free: dict[str, None] = {}  # names that may be sharded, in order
    whole: set[str] = set()
    sums: set[str] = set()

    def dims_of(group: str) -> Dims:
        found = []
        for word in group.split():
            match = _DIM.fullmatch(word)
            if match is None:
                raise ValueError(f"{word!r} is no dimension: write name, name+, (name) or _")
            name = match["name"] or match["whole"] or "_"
            if name != "_" and name in found:
                raise ValueError(f"one tensor has {name} twice")
            found.append(name)
            free.update({name: None} if match["name"] else {})
            whole.update({name} if match["whole"] else ())
            sums.update({name} if match["sums"] else ())
        return tuple(found)

    arguments, results = (tuple(map(dims_of, side.split(","))) for side in sides)
    if "+" in sides[1]:
        raise ValueError("'+' belongs to arguments: what it sums over is in no result")
    if both := whole & free.keys():
        raise ValueError(f"{min(both)} may be sharded in one place and not in another")
    read = {name for dims in arguments for name in dims}
    if made := [name for name in free if name not in read]:
        raise ValueError(f"no argument has {made[0]}: write ({made[0]}) or _ in the result")
    kept = {name for name in free if all(name in dims for dims in results)}
    if idle := sums & kept:
        raise ValueError(
            f"'+' says that a result is a sum over {min(idle)}, and every result has it"
        )
    ways = tuple(name for name in free if name in kept | sums)
    return Sharding(text, arguments, results, ways, frozenset(sums))


def shardings_of(target: Any, texts: Iterable[str]) -> tuple[Sharding, ...]:
    """Those that texts say of an operator.

    Raises:
        UsageError: a text is malformed, or for another number of tensors.
    """
    found = []
    for text in texts:
        try:
            found.append(parse_sharding(text))
            _check_counts(target, found[-1])
        except ValueError as error:
            raise UsageError(
                f"{target}: the sharding {text!r} cannot be used: {error}",
                do="write the dimensions of each tensor argument and of each result, such as "
                "'rows _, _ -> rows _'",
            ) from None
    return tuple(found)


def _check_counts(target: Any, sharding: Sharding) -> None:
    for kind, named, declared in (
        ("tensor argument", sharding.arguments, target._schema.arguments),
        ("result", sharding.results, target._schema.returns),
    ):
        types = [str(each.type) for each in declared if "Tensor" in str(each.type)]
        wrong = len(named) > len(types) or (kind == "result" and len(named) < len(types))
        if wrong and not any("List" in each for each in types):
            raise ValueError(f"it has {len(named)} {kind}s, the operator {len(types)}")


def ways_of(node: fx.Node, results: Sequence[object]) -> list[Way]:
    """The ways in which a call of a registered operator may be sharded.

    Raises:
        UsageError: none of the texts fits the call.
    """
    known = REGISTERED[node.target]
    schema = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    nodes: list[Any] = []
    for argument in schema.arguments:
        if "Tensor" in str(argument.type):
            value = given.get(argument.name)
            nodes += value if isinstance(value, (list, tuple)) else [value]
    values = [meta(n)["val"] if isinstance(n, fx.Node) else None for n in nodes]
    misfits = []
    for sharding in known.sharding:
        if not (misfit := sharding.misfit(values, results)):
            return [sharding.way(name, values, results) for name in sharding.ways]
        misfits.append(f"{sharding.text!r}: {misfit}")
    raise UsageError(
        f"{node.target}: no registered sharding fits this call",
        where=meta(node).get("name"),
        why="; ".join(misfits),
        do="register a sharding for tensors of these dimensions, too",
    )


def cost_of(node: fx.Node) -> tuple[float, float] | None:
    """FLOPs and bytes of a call as its author counts them, by local shapes; None where nobody does."""
    known = REGISTERED.get(node.target)
    if known is None or known.cost is None:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: meta(a)["val"])
    told = known.cost(*args, **kwargs)  # type: ignore[arg-type]
    if not isinstance(told, tuple) or len(told) != 2:
        raise UsageError(f"{node.target}: its cost is {told!r}", do="return (FLOPs, bytes)")
    return told


def replicated_note(operator: str, name: str) -> str:
    """What the report says of an operation that no rule could place."""
    note = f"{operator} has no sharding rule here, so it is replicated: {name}"
    if not is_own(operator):
        return note
    return f"{note}; stepgraph.register_operator({operator}, sharding=...) would let it be sharded"
