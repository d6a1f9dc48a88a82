"""Copies of the tensors that code reads from outside, where programs take them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stepgraph.capture.outside_tensors import OutsideTensor
from stepgraph.errors import UsageError
from stepgraph.program import roles
from stepgraph.runtime.ranks import agree_on
from stepgraph.runtime.state import State


class OutsideTensors:
    """Brings what was put there, or written there, since it was brought last.

    Args:
        state: programs take the copies from it.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._brought: dict[str, tuple[torch.Tensor, int]] = {}

    def bring(self, tensors: Sequence[OutsideTensor]) -> None:
        """Called by all ranks, before a program that takes these runs.

        They are copied each time: what is written through ``.data`` leaves no trace.

        Raises:
            UsageError: ranks have different values; something else is there now.
        """
        for one in tensors:
            now = one.now
            if isinstance(now, torch.Tensor) and (own := self._state.before.name_of(now)):
                raise UsageError(
                    f"{one.name!r} is the model's parameter {own!r}, as it was before it was placed",
                    why="a step changes the one that the model has now, and computes its gradient alone",
                    do="reach it through the model: loss(model, batch) is given it",
                )
            if not isinstance(now, torch.Tensor):
                raise UsageError(
                    f"{one.name!r}, which the code reads from outside, is no tensor now, but {now!r}",
                    do="keep a tensor there: its values may change",
                )
            before = self._brought.get(one.name)
            new = before is None or before[0] is not now or before[1] != now._version
            self._copy(one.name, now, new)
            self._brought[one.name] = now, now._version

    def _copy(self, name: str, now: torch.Tensor, compare: bool) -> None:
        state, role = self._state, roles.Outside(name)
        with torch.no_grad():
            whole = now.full_tensor() if isinstance(now, DTensor) else now.detach()
            whole = whole.to(state.device)
            if compare and state.ranks.shape.world_size > 1:
                first = whole.contiguous().clone()
                agree_on(first, state.ranks)
                differs = (first != whole).logical_and(first == first).any().float()
                dist.all_reduce(differs)
                if differs:
                    raise UsageError(
                        f"{name!r}, which the code reads from outside, differs between ranks",
                        why="a step is that of one process, which has one of it",
                        do="make it the same on all ranks (torch.distributed.broadcast), or pass it in the "
                        "batch if each rank has rows of its own",
                    )
            placements, held = state.values[role].placements, state.tensors[role]
            assert placements is not None
            part = state.part_of(whole, placements)
            if (part.shape, part.dtype) != (held.shape, held.dtype):
                raise UsageError(
                    f"{name!r}, which the code reads from outside, is {list(now.shape)} "
                    f"{now.dtype} now, and programs take another shape or type of it",
                    do="pass it in the batch, where shapes may change",
                )
            held.copy_(part)
