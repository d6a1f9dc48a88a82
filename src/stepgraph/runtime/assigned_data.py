"""Data that is assigned to a placed parameter: it changes what a DTensor looks like, and nothing else."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.errors import UsageError, name_a_few
from stepgraph.torch_internals import dtensors
from stepgraph.torch_internals.shown_memory import ShownMemory
from stepgraph.torch_internals.words import Snapshot


class AssignedData:
    """What each parameter of a model has held since it was placed; looked at before every call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._data, self._own = self._seen()

    def _seen(self) -> tuple[ShownMemory, list[Any]]:
        """What assigning to ``.data`` replaces, and of each parameter the part that it does not reach."""
        own = [dtensors.own_part(p) if isinstance(p, DTensor) else p for p in self._parameters]
        return ShownMemory(self._parameters), own

    def snapshot(self) -> Snapshot | None:
        """What would have to be written to; None: that is not known."""
        return self._data.snapshot

    def check(self) -> None:
        """Takes in what was converted, ``model.to(dtype)``: there the part is another one as well.

        Raises:
            UsageError: other data was assigned; names the parameters.
        """
        if self._data.same():
            return
        data, own = self._seen()
        before, now = self._data.storages, data.storages
        rows = zip(self._model.named_parameters(), now, before, own, self._own, strict=True)
        changed = [name for (name, _), a, b, c, d in rows if a is not b and c is d]
        if not changed:
            self._data, self._own = data, own
            return
        raise UsageError(
            f"other data was assigned to parameters after they were placed: {name_a_few(changed)}",
            why="they are DTensors, and assigning to .data does not reach their parts",
            do="write in place, parameter.data.copy_(values) with a DTensor of the same placements, or "
            "use engine.load_state_dict with whole tensors",
        )
