"""Which call a training call is: what its random operations draw from, besides seed and coordinate."""

import torch

from stepgraph.torch_internals import host_device
from stepgraph.torch_internals.graphs import backward_now

_KEPT = 65_536  # calls whose backward may still come


class CallNumbers:
    """Numbers from 0, one for each call; one that is run again has that of its first run.

    ``torch.utils.checkpoint`` runs a call again within the backward, and sets torch's generator on the
    host back for it. So a call that draws takes a token from that generator, by which it is known again.
    Without ``preserve_rng_state`` it is another call, whose masks are others, as torch has it.
    """

    def __init__(self) -> None:
        self.next = 0
        self._known: dict[int, int] = {}

    def take(self, draws: bool) -> int:
        """The number of a call that begins; ``draws``: whether it has random operations."""
        token = None
        if draws:
            token = int(torch.empty((), dtype=torch.int64, device=host_device()).random_())
            if backward_now() is not None and token in self._known:
                return self._known[token]
        number, self.next = self.next, self.next + 1
        if token is not None:
            self._known[token] = number
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return number
