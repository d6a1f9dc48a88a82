"""Changes of placement over a whole mesh: the steps, one mesh dimension at a time, and what they cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stepgraph import torch_internals
from stepgraph.cost.collectives import Group, collective_seconds, links, merged_seconds
from stepgraph.cost.devices import Device
from stepgraph.program.collectives import KINDS, SHARD_OF, redistribute
from stepgraph.program.layout import (
    InnerShard,
    MeshShape,
    Placements,
    SplitBlockError,
    blocks_held,
    blocks_of,
    chunk_size,
    local_shape,
)
from stepgraph.program.metadata import meta

aten = torch.ops.aten


def redistribute_over(
    emit: Callable[..., Any],
    value: Any,
    shape: Sequence[int],
    have: Placements,
    want: Placements,
    mesh: MeshShape,
) -> Any:
    """Emits what changes a value's placements, each mesh dimension at most twice.

    Args:
        emit: as :func:`stepgraph.program.collectives.redistribute` takes it.
        value: the node, placed as ``have``.
        shape: its global shape.
    """
    for axis, target in steps(have, want):
        value = _change(emit, value, shape, have, axis, target, mesh)
        have = (*have[:axis], target, *have[axis + 1 :])
    return value


def _change(
    emit: Callable[..., Any],
    value: Any,
    shape: Sequence[int],
    have: Placements,
    axis: int,
    target: Placement,
    mesh: MeshShape,
) -> Any:
    """One step of :func:`redistribute_over`."""
    mesh_dim, ranks = mesh.dims[axis]
    if ranks == 1:  # the one rank's part is the whole, whatever the placement says
        return value
    old = have[axis]
    before = (*have[:axis], Replicate(), *have[axis + 1 :])
    size = local_shape(shape, before, mesh)[old.dim] if isinstance(old, Shard) else 0
    others = [(p, n) for i, (p, n) in enumerate(zip(before, mesh.sizes, strict=True)) if i != axis]
    held = [
        InnerShard(p.dim, blocks_held(p, others)) if isinstance(p, InnerShard) else p
        for p in (old, target)
    ]
    return redistribute(emit, value, *held, mesh_dim, ranks, size)


@functools.lru_cache(maxsize=100_000)
def steps(have: Placements, want: Placements) -> tuple[tuple[int, Placement], ...]:
    """One change of placement per mesh dimension: communication inside out, then slices outside in.

    Where several mesh dimensions shard one dimension of the value, the outer one comes first. So before an
    outer one changes, the inner ones are undone; and a new one waits for those outside it.
    """
    changed = {axis for axis in range(len(have)) if have[axis] != want[axis]}
    undone, waiting = set[int](), set[int]()
    shards = [
        {(p.dim, blocks_of(p)) for p in pair if isinstance(p, Shard)}
        for pair in zip(have, want, strict=True)
    ]
    for part in set().union(*shards):
        sharing = sorted(axis for axis, parts in enumerate(shards) if part in parts)
        if len(sharing) == 1 or not changed.intersection(sharing):
            continue
        first = min(changed.intersection(sharing))
        for axis in sharing:
            if axis > first and _shards(have[axis], part):
                undone.add(axis)
            elif axis in changed and _shards(want[axis], part):
                (undone if _shards(have[axis]) else waiting).add(axis)
    steps: list[tuple[int, Placement]] = []
    for axis in reversed(range(len(have))):
        if axis in undone:
            steps.append((axis, Replicate()))
        elif axis in changed - waiting and not isinstance(have[axis], Replicate):
            steps.append((axis, want[axis]))
    for axis in range(len(have)):
        begins = axis in changed and isinstance(have[axis], Replicate)
        ends_whole = axis in undone and isinstance(want[axis], Replicate)
        if (begins or axis in undone | waiting) and not ends_whole:
            steps.append((axis, want[axis]))
    return tuple(steps)


def _shards(placement: Placement, part: tuple[int, int] | None = None) -> bool:
    """Whether it shards a dimension: this one, of so many blocks."""
    if not isinstance(placement, Shard):
        return False
    return part is None or (placement.dim, blocks_of(placement)) == part


def can_become(have: Placement, want: Placement) -> bool:
    """Whether there is any sense in a change: sums are made of what is whole, or is an average."""
    if have == want or not isinstance(want, Partial):
        return True
    averages = isinstance(have, Partial) and have.reduce_op == "avg"
    return want.reduce_op == "sum" and (isinstance(have, Replicate) or averages)


@dataclass(frozen=True)
class _Part:
    """What stands for a rank's tensor while costs are added up."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.itemsize * math.prod(self.shape)

    def dense(self, shape: Sequence[int]) -> _Part:
        """Of another shape, contiguous."""
        return _Part(tuple(shape), dense_strides(shape), self.itemsize)

    def resized(self, dim: int, size: int) -> _Part:
        """With another size of a dimension, contiguous."""
        return self.dense((*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def is_contiguous(self) -> bool:
        dense = dense_strides(self.shape)
        return all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, self.strides, dense, strict=True)
        )

    def dim(self) -> int:
        return len(self.shape)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


def local_strides(
    shape: Sequence[int], strides: Sequence[int], part: Sequence[int]
) -> tuple[int, ...]:
    """Strides of a rank's part of a value: the same dimensions inside one another, the same gaps."""
    found = list(strides)
    whole = own = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim] = strides[dim] * own // whole
            whole, own = strides[dim] * shape[dim], found[dim] * part[dim]
    return tuple(found)


@dataclass(frozen=True)
class Cost:
    """Seconds of a change of placement: ``once``, and ``again`` in each phase that reads the result.

    What ranks gathered is gathered again for the backward, by every memory policy; what they added up or
    exchanged is kept: ``kept`` bytes. ``temporary``: bytes that its largest step reads and writes.
    ``wires``: seconds of collectives inside nodes and between them; ``last``: of the last step of all,
    where that is a collective.
    """

    once: float
    again: float = 0.0
    kept: int = 0
    temporary: int = 0
    wires: tuple[float, float] = (0.0, 0.0)
    last: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Of doing it once."""
        return self.once + self.again


@dataclass(frozen=True)
class _Emitted:
    """An operation of a change of placement.

    ``bytes``: of its result. ``wires``: seconds inside nodes and between, none of a copy; None: a view.
    """

    target: Any
    seconds: float
    bytes: int
    temporary: int
    wires: tuple[float, float] | None


class Moves:
    """What changes of placement cost, by shape, type and placements.

    A collective costs what :mod:`stepgraph.cost.collectives` says, a copy around it what the device takes
    to read and write it; a slice is a view, and free.
    """

    def __init__(self, mesh: MeshShape, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self.groups: Mapping[str, Group] = links(mesh, device)
        self._known: dict[Any, Cost] = {}
        self._steps: dict[Any, tuple[_Part, tuple[_Emitted, ...]]] = {}
        self._copies: dict[tuple[int, torch.dtype], float] = {}

    def cost(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        have: Placements,
        want: Placements,
        strides: tuple[int, ...] | None = None,
        merged: bool = False,
    ) -> Cost:
        """Time on one rank, of all steps one after the other; infinite where there is no way.

        Args:
            shape, strides: of the whole value; without strides it is contiguous.
            merged: small collectives run together with those of other such values.
        """
        if have == want:
            return Cost(0.0)
        key = (shape, dtype, have, want, strides or dense_strides(shape), merged)
        if (found := self._known.get(key)) is None:
            try:
                found = self._add_up(*key)
            except SplitBlockError:  # no way that this program knows
                found = Cost(math.inf)
            self._known[key] = found
        return found

    def _add_up(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        have: Placements,
        want: Placements,
        strides: tuple[int, ...],
        merged: bool,
    ) -> Cost:
        if any(not can_become(p, q) for p, q in zip(have, want, strict=True)):
            return Cost(math.inf)
        once = again = 0.0
        kept = temporary = 0
        wires = last = (0.0, 0.0)
        own = local_shape(shape, have, self.mesh)
        part = _Part(own, local_strides(shape, strides, own), dtype.itemsize)
        for axis, target in steps(have, want):
            part, emitted = self._step(part, shape, dtype, have, axis, target, merged)
            have = (*have[:axis], target, *have[axis + 1 :])
            for one in emitted:
                temporary = max(temporary, one.temporary)
                last = last if one.wires is None else one.wires
                if one.target in KINDS:
                    wires = (wires[0] + last[0], wires[1] + last[1])
                gathered = again > 0 and one.target not in KINDS
                if one.target is torch_internals.ALL_GATHER or gathered:
                    again += one.seconds
                else:  # it is kept, and what came before is not asked for again
                    once, again, kept = once + again + one.seconds, 0.0, one.bytes
        return Cost(once, again, kept if once else 0, temporary, wires, last)

    def _step(
        self,
        part: _Part,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        have: Placements,
        axis: int,
        target: Placement,
        merged: bool,
    ) -> tuple[_Part, tuple[_Emitted, ...]]:
        """What one step makes of a rank's part, and what it emits; many changes have the same ones."""
        key = part, shape, dtype, have, axis, target, merged
        if (found := self._steps.get(key)) is not None:
            return found
        emitted: list[_Emitted] = []

        def emit(target: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
            before = meta(node)["val"]
            after = _result(target, before, args)
            moved, seconds, wires = before.bytes + after.bytes, 0.0, None
            if target in KINDS:
                size, group = max(before.bytes, after.bytes), self.groups[args[-1]]
                if merged:
                    seconds = merged_seconds(KINDS[target], size, group, self.device)
                else:
                    seconds = float(collective_seconds(KINDS[target], size, group))
                wires = (0.0, seconds) if group.crosses else (seconds, 0.0)
            elif target in _COPIES:
                seconds, wires = self._copied(moved, dtype), (0.0, 0.0)
            temporary = 0 if wires is None else moved
            emitted.append(_Emitted(target, seconds, after.bytes, temporary, wires))
            return SimpleNamespace(meta={"val": after})  # a node without a graph

        start = SimpleNamespace(meta={"val": part})
        end = _change(emit, start, shape, have, axis, target, self.mesh)
        found = self._steps[key] = meta(end)["val"], tuple(emitted)
        return found

    def _copied(self, size: int, dtype: torch.dtype) -> float:
        """Seconds of a copy that reads and writes so many bytes."""
        key = size, dtype
        if key not in self._copies:
            self._copies[key] = self.device.seconds(0.0, size, dtype)
        return self._copies[key]


# Not what makes a whole value one rank's share of a sum: only sums read that, in one kernel with it.
_COPIES = {aten.clone.default, aten.constant_pad_nd.default, aten.div.Scalar}


def _result(target: Any, part: _Part, args: tuple) -> _Part:
    """Shape and strides of one emitted operation's result."""
    if target in _RESULTS:
        return _RESULTS[target](part, *args)
    return part.dense(part.shape)


def _permuted(part: _Part, order: Sequence[int]) -> _Part:
    shape, strides = (tuple(each[i] for i in order) for each in (part.shape, part.strides))
    return _Part(shape, strides, part.itemsize)


def _transposed(part: _Part, a: int, b: int) -> _Part:
    order = list(range(part.dim()))
    order[a], order[b] = b, a
    return _permuted(part, order)


def _viewed(part: _Part, sizes: Sequence[int]) -> _Part:
    if part.is_contiguous():
        return part.dense(sizes)
    shape, strides, new = list(part.shape), list(part.strides), list(sizes)
    dim = next(  # one dimension in two
        i for i in range(len(shape)) if [*new[:i], new[i] * new[i + 1], *new[i + 2 :]] == shape
    )
    strides.insert(dim, strides[dim] * new[dim + 1])
    return _Part(tuple(new), tuple(strides), part.itemsize)


def _padded(part: _Part, pads: Sequence[int], *_: Any) -> _Part:
    dim = part.dim() - len(pads) // 2
    return part.resized(dim, part.shape[dim] + pads[-1])


# What an emitted operation makes of shape and strides; any other keeps the shape, and is contiguous.
_RESULTS: dict[Any, Callable[..., _Part]] = {
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.slice.Tensor: (
        lambda part, dim, start, end: replace(part.resized(dim, end - start), strides=part.strides)
    ),
    aten.view.default: _viewed,
    aten.constant_pad_nd.default: _padded,
    torch_internals.ALL_GATHER: lambda part, ranks, *_: part.resized(0, part.shape[0] * ranks),
    torch_internals.REDUCE_SCATTER: (
        lambda part, kind, ranks, *_: part.resized(0, part.shape[0] // ranks)
    ),
    SHARD_OF: (lambda part, dim, ranks, *_: part.resized(dim, chunk_size(part.shape[dim], ranks))),
}
