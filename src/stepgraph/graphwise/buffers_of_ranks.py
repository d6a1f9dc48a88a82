"""Buffers that the code of a module changes graph by graph: every rank ends with the same ones.

A rank's code sees this rank's rows alone, so what it writes into a buffer, or puts in one's place, is of
those. After each backward (or what else ends a call) ranks compare which buffers changed, and each becomes
what all ranks have together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from stepgraph import torch_internals
from stepgraph.errors import name_a_few
from stepgraph.graphwise.known import Known
from stepgraph.torch_internals import graphs as dynamo
from stepgraph.torch_internals import pytree

MEANS = (
    "buffers that the forward changes of each data-parallel rank's own rows become the mean over ranks "
    "(numbers that are no floating-point: the first rank's): {}"
)
APART = "buffers stay each data-parallel rank's own, because their shapes differ: {}"


class BuffersOfRanks:
    """The buffers of a model that ranks keep alike.

    Args:
        ranks, group: how many, and their process group.
        rank: this one's number.
        known: how ranks have what graphs made, as far as it is known.
        report: takes notes.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        group: str,
        rank: int,
        known: Known,
        report: Callable[[list[str]], None],
    ) -> None:
        self._ranks, self._group, self._rank = ranks, group, rank
        self._known, self._report = known, report
        self._places = [
            (f"{path}.{leaf}" if path else leaf, module, leaf)
            for path, module in model.named_modules()
            for leaf in module._buffers
        ]
        self._seen = self._now()
        self._alike = Replicate()  # a graph's own finding is another object
        self._mark_alike()
        self._waits = self._queued = False

    def _mark_alike(self) -> None:
        self._known.update((buffer, self._alike) for buffer, _ in self._seen if buffer is not None)

    def _now(self) -> list[tuple[torch.Tensor | None, int]]:
        held = [module._buffers.get(leaf) for _, module, leaf in self._places]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in held]

    def changed(self) -> None:
        """A forward ran."""
        self._waits = True

    def follow(self, result: Any) -> None:
        """They are made alike after a backward from what a forward returned, or before the next forward."""
        if self._ranks == 1 or not self._places:
            return

        def reached(gradient: torch.Tensor) -> None:
            if not self._queued:
                self._queued = True
                # behind what others run when it is done: the backward of compiled autograd
                dynamo.after_backward(lambda: dynamo.after_backward(self.make_alike))

        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(reached)

    def make_alike_if_due(self) -> None:
        """As :meth:`make_alike`, if a forward ran since the last time."""
        if self._waits:
            self.make_alike()

    def make_alike(self) -> None:
        """Makes what changed the same on every rank; called by all of them."""
        self._waits = self._queued = False
        if self._ranks == 1 or not self._places:
            return
        now = self._now()
        changed = [a is not c or b != d for (a, b), (c, d) in zip(now, self._seen, strict=True)]
        kinds = [0 if x is None else zlib.crc32(f"{x.shape}{x.dtype}".encode()) for x, _ in now]
        device = next((x.device for x, _ in now if x is not None), None)
        words = torch.tensor([*map(int, changed), *kinds, *(-k for k in kinds)], device=device)
        largest = torch_internals.sum_over_group(words, self._group, "max").tolist()
        count = len(kinds)
        means, apart = [], []
        by_type: dict[torch.dtype, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for i, (buffer, _) in enumerate(now):
            if not largest[i]:
                continue
            name = self._places[i][0]
            if largest[count + i] != -largest[2 * count + i] or buffer is None:
                apart += [name] if largest[count + i] else []
                continue
            how = self._known[buffer]
            if isinstance(how, Replicate) and how is not self._alike:
                continue
            if not isinstance(how, Partial):
                means.append(name)
            part = self._part(buffer.detach(), how)
            by_type.setdefault(part.dtype, []).append((i, buffer, part))
        for several in by_type.values():
            flat = torch.cat([part.reshape(-1) for _, _, part in several])
            total = torch_internals.sum_over_group(flat, self._group)
            pieces = total.split([part.numel() for _, _, part in several])
            for (i, buffer, _), piece in zip(several, pieces, strict=True):
                self._put(i, buffer, piece.view(buffer.shape).to(buffer.dtype))
        self._seen = self._now()
        self._mark_alike()
        notes = [MEANS.format(name_a_few(means))] if means else []
        self._report(notes + ([APART.format(name_a_few(apart))] if apart else []))

    def _part(self, value: torch.Tensor, how: Any) -> torch.Tensor:
        """What is added up over ranks."""
        if isinstance(how, Partial) and how.reduce_op == "sum":
            return value
        if value.is_floating_point() or value.is_complex():
            return value / self._ranks
        value = value.to(torch.int64)
        return value if self._rank == 0 else torch.zeros_like(value)

    def _put(self, index: int, buffer: torch.Tensor, value: torch.Tensor) -> None:
        _, module, leaf = self._places[index]
        with torch.no_grad():
            if buffer is self._seen[index][0]:
                buffer.copy_(value)
            else:  # the code put it there, and a graph may have saved it
                module._buffers[leaf] = value
